"""`GET /openapi.json`: the description of all endpoints, which needs no key."""

from __future__ import annotations

import asyncio
import json

from fastapi import APIRouter, FastAPI, Response


def api_description_routes(app: FastAPI) -> APIRouter:
    """The endpoint. (FastAPI's own takes most of a second of the event loop at first, and 6 ms with every request.)"""
    router = APIRouter(include_in_schema=False)
    lock = asyncio.Lock()
    written: list[bytes] = []

    def write() -> bytes:
        return json.dumps(app.openapi(), ensure_ascii=False, separators=(",", ":")).encode()

    @router.get("/openapi.json")
    async def read_api_description() -> Response:
        async with lock:
            if not written:
                written.append(await asyncio.to_thread(write))
        return Response(written[0], media_type="application/json")

    return router
