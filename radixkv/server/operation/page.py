"""`GET /`: a page that shows the state of the engine, served from this package; it loads nothing from other hosts."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from fastapi import APIRouter, Response

_STATIC = Path(__file__).parent / "static"
# The page shows prompts, which may contain any markup: no script but the page's own may run.
_HEADERS = MappingProxyType(
    {
        "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
)


def page_routes() -> APIRouter:
    """The page and its files. They need no key; the state that the page shows does."""
    router = APIRouter(include_in_schema=False)

    def add_file(path: str, name: str, media_type: str) -> None:
        content = (_STATIC / name).read_bytes()

        @router.get(path)
        async def file() -> Response:
            return Response(content, media_type=media_type, headers=_HEADERS)

    add_file("/", "index.html", "text/html; charset=utf-8")
    add_file("/favicon.svg", "favicon.svg", "image/svg+xml")
    add_file("/page.css", "page.css", "text/css; charset=utf-8")
    add_file("/page.js", "page.js", "text/javascript; charset=utf-8")
    return router
