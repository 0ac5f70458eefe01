"""The base of all request models."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Refuses unknown fields and values of another type: a misspelt option should not be ignored silently."""

    model_config = ConfigDict(extra="forbid", strict=True)
