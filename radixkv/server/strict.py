"""The base of everything that clients send."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Takes no unknown fields and no values of another type: a misspelt option should not be ignored in silence."""

    model_config = ConfigDict(extra="forbid", strict=True)
