"""`GET /`: a page that shows what the engine is doing, served from this package; it loads nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

_STATIC = Path(__file__).parent / "static"
# A prompt may hold anything, and is shown: whatever the page would mistake for its own must not run.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def page_routes() -> APIRouter:
    """The page and its files. They need no key; what the page shows does."""
    router = APIRouter(include_in_schema=False)

    def serve(path: str, name: str, media_type: str) -> None:
        @router.get(path)
        async def file() -> FileResponse:
            return FileResponse(_STATIC / name, media_type=media_type, headers=_HEADERS)

    serve("/", "index.html", "text/html; charset=utf-8")
    serve("/favicon.svg", "favicon.svg", "image/svg+xml")
    serve("/page.css", "page.css", "text/css; charset=utf-8")
    serve("/page.js", "page.js", "text/javascript; charset=utf-8")
    return router
