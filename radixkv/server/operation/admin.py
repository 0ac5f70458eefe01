"""Administration: clear, verify and show the cache, and drain the server."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from fastapi import APIRouter, Depends
from fastapi.responses import Response
from pydantic import BaseModel, model_validator
from pydantic_core import PydanticCustomError

from radixkv.cache import InvariantViolation
from radixkv.engine.clearing import ALL_NAMESPACES, NamespaceSelection
from radixkv.observe.inspect.snapshot import take_snapshot
from radixkv.server.access.authentication import administrator
from radixkv.server.access.tenants import Tenants
from radixkv.server.errors import ApiError
from radixkv.server.service import Service
from radixkv.server.strict import StrictModel

if TYPE_CHECKING:
    from radixkv.async_llm import AsyncLLM


class ClearRequest(StrictModel):
    """What to clear: everything; with ``api_key`` all of that tenant; with ``cache_salt`` too only that salt's prefixes.

    ``key_name`` selects a tenant by the name of its key in the file of keys, from which the key may have been removed.

    In tiers below the pool, a tenant's salts are always cleared together. Where no API keys are configured, ``cache_salt``
    alone selects the prefixes of that salt.
    """

    api_key: str | None = None
    key_name: str | None = None
    cache_salt: str | None = None

    @model_validator(mode="after")
    def _one_tenant(self) -> ClearRequest:
        if self.api_key is not None and self.key_name is not None:
            raise PydanticCustomError("two_tenants", "api_key: expected nothing beside key_name")
        return self


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
    """The endpoints of every server; they need the admin key."""
    router = APIRouter(prefix="/admin", tags=["administration"], dependencies=[Depends(administrator)])

    @router.post("/clear_cache")
    async def clear_cache(body: ClearRequest) -> ClearResponse:
        """Clear prefixes cached here or on replicas, and responses stored here: all, one tenant's, or one salt's."""
        selection = _selection_of(body, service.tenants)
        service.responses.clear(selection)
        return ClearResponse(**(await service.llm.clear(selection))._asdict())

    @router.post("/drain")
    async def drain() -> DrainResponse:
        """What SIGTERM does: refuse new requests here, finish the unfinished ones, and exit. Replicas go on."""
        service.drain()
        return DrainResponse(unfinished_requests=service.llm.num_slots_taken)

    return router


def cache_routes(llm: AsyncLLM) -> APIRouter:
    """The endpoints that look into the cache of one engine; they need the admin key."""
    router = APIRouter(prefix="/admin", tags=["administration"], dependencies=[Depends(administrator)])

    @router.post("/check")
    async def check() -> CheckResponse:
        """Verify every rule of the cache's bookkeeping; 500 if one is broken. It takes longer the fuller the cache is."""
        try:
            return await check_cache(llm)
        except InvariantViolation as violation:
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, f"the cache is broken: {violation}") from violation

    @router.get("/snapshot")
    async def snapshot() -> Response:
        """All that is cached, of every tenant, with texts, for `radixkv inspect`. No step runs while it is taken."""
        return Response(await snapshot_json(llm), media_type="application/json")

    return router


async def check_cache(llm: AsyncLLM) -> CheckResponse:
    """Verify every rule of the bookkeeping of an engine's cache.

    Raises:
        InvariantViolation: one is broken.
        EngineDeadError: the engine has died.
    """
    await llm.call(lambda engine: engine.cache.check())
    stats = llm.stats
    return CheckResponse(
        free_blocks=stats.num_free_blocks,
        evictable_blocks=stats.num_evictable_blocks,
        blocks_in_use=stats.num_blocks_in_use,
        running_requests=stats.num_running,
        waiting_requests=stats.num_waiting,
    )


async def snapshot_json(llm: AsyncLLM) -> str:
    """A `CacheSnapshot` of an engine, as JSON: all that is cached, of every tenant, with texts.

    Raises:
        ValueError: the model has no tokenizer.
        EngineDeadError: the engine has died.
    """
    decode = llm.loaded.require_tokenizer().decode
    snapshot = await llm.call(lambda engine: take_snapshot(engine.cache, decode, engine.pool.block_nbytes))
    return snapshot.to_json()


def _selection_of(body: ClearRequest, tenants: Tenants) -> NamespaceSelection:
    """The namespaces that a request to clear selects."""
    if body.api_key is None and body.key_name is None and body.cache_salt is None:
        return ALL_NAMESPACES
    name = body.key_name
    tenant = tenants.selected_by_admin(body.api_key) if name is None else tenants.by_key_name(name)
    return NamespaceSelection(tenant.namespace(body.cache_salt), derived=body.cache_salt is None)
