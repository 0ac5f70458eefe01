"""Requests to `/v1/responses`."""

from __future__ import annotations

from typing import Any

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

BODY: dict[str, Any] = {"input": "Name three colours.", "max_output_tokens": 12, "temperature": 0}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


async def create(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/responses", json={**BODY, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    Response.model_validate(body)  # openai's own model, with every required field
    return body
