"""Responses from pydantic models."""

from __future__ import annotations

from fastapi.responses import Response
from pydantic import BaseModel


class JsonResponse(Response):
    """A model as JSON, written once. (What a route returns as a plain model would be validated and copied again.)"""

    media_type = "application/json"

    def __init__(self, content: BaseModel) -> None:
        super().__init__(content.model_dump_json())
