"""Administration: clear and verify the cache, and drain the server."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from radixkv.cache import InvariantViolation
from radixkv.engine.engine import Engine
from radixkv.server.authentication import administrator
from radixkv.server.errors import ApiError
from radixkv.server.service import Service
from radixkv.server.strict import StrictModel


class ClearRequest(StrictModel):
    """What to clear: everything; with ``api_key`` all of that tenant; with ``cache_salt`` too only that salt's prefixes.

    In tiers below the pool, a tenant's salts are always cleared together. Where no API keys are configured, ``cache_salt``
    alone selects the prefixes of that salt.
    """

    api_key: str | None = None
    cache_salt: str | None = None


class ClearResponse(BaseModel):
    """The result. Blocks that running requests use are not freed, but no later request can match them."""

    namespaces: int
    freed_blocks: int
    blocks_in_use: int
    cached_blocks: int


class CheckResponse(BaseModel):
    """The cache's blocks, every rule of its bookkeeping verified."""

    free_blocks: int
    evictable_blocks: int
    blocks_in_use: int
    running_requests: int
    waiting_requests: int


class DrainResponse(BaseModel):
    """How many requests are still to be finished before the server exits."""

    unfinished_requests: int


def admin_routes(service: Service) -> APIRouter:
    """The endpoints; all need the admin key."""
    router = APIRouter(prefix="/admin", tags=["administration"], dependencies=[Depends(administrator)])
    llm = service.llm

    @router.post("/clear_cache")
    async def clear_cache(body: ClearRequest) -> ClearResponse:
        """Clear cached prefixes: all, one tenant's, or one salt's."""
        selected = _namespace_filter(body, service)

        below = _cleared_below(body, service)

        def clear(engine: Engine) -> tuple[int, int]:
            namespaces = [name for name in engine.cache.namespaces if selected(name)]
            num_freed = sum(engine.cache.clear(name) for name in namespaces)
            engine.cache.clear(below)  # of what is not cached any more, something may be below the pool
            return len(namespaces), num_freed

        num_namespaces, num_freed = await llm.call(clear)
        stats = llm.stats
        return ClearResponse(
            namespaces=num_namespaces,
            freed_blocks=num_freed,
            blocks_in_use=stats.num_blocks_in_use,
            cached_blocks=stats.num_evictable_blocks,
        )

    @router.post("/check")
    async def check() -> CheckResponse:
        """Verify every rule of the cache's bookkeeping; 500 if one is broken. It takes longer the fuller the cache is."""
        try:
            await llm.call(lambda engine: engine.cache.check())
        except InvariantViolation as violation:
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, f"the cache is broken: {violation}") from violation
        stats = llm.stats
        return CheckResponse(
            free_blocks=stats.num_free_blocks,
            evictable_blocks=stats.num_evictable_blocks,
            blocks_in_use=stats.num_blocks_in_use,
            running_requests=stats.num_running,
            waiting_requests=stats.num_waiting,
        )

    @router.post("/drain")
    async def drain() -> DrainResponse:
        """What SIGTERM does: refuse new requests, finish the unfinished ones, and exit."""
        service.drain()
        return DrainResponse(unfinished_requests=llm.num_unfinished)

    return router


def _cleared_below(body: ClearRequest, service: Service) -> str | None:
    """The namespace whose tenant is cleared below the pool; None: everything."""
    if body.api_key is None and body.cache_salt is None:
        return None
    return service.tenants.selected_by_admin(body.api_key).namespace(body.cache_salt)


def _namespace_filter(body: ClearRequest, service: Service) -> Callable[[str], bool]:
    """A predicate: whether a request to clear selects a namespace."""
    tenants = service.tenants
    if body.api_key is None and body.cache_salt is None:
        return lambda namespace: True
    tenant = tenants.selected_by_admin(body.api_key)
    if body.cache_salt is None:
        return tenant.owns
    selected = tenant.namespace(body.cache_salt)
    return lambda namespace: namespace == selected
