"""Cache introspection over HTTP: snapshots, pins, and explanations of why a prompt was not reused."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import Response
from pydantic import BaseModel, Field

from radixkv.cache import PinQuotaExceeded
from radixkv.observe.inspect.snapshot import take_snapshot
from radixkv.prompts import Prompt, as_prompts
from radixkv.server.authentication import administrator
from radixkv.server.errors import ApiError, client_errors
from radixkv.server.service import Service
from radixkv.server.strict import StrictModel

if TYPE_CHECKING:
    from radixkv.async_llm import AsyncLLM
    from radixkv.engine.engine import Engine

# Of one request.
MAX_EXPLAINED = 16


class CacheExplanation(BaseModel):
    """How much of a prompt was cached at its arrival, and why not more; the fields of `PromptExplanation.as_dict`."""

    text: str
    num_prompt_tokens: int
    num_reused_tokens: int
    below: list[dict[str, Any]]
    computed: list[dict[str, Any]]
    difference: dict[str, Any] | None


class PinRequest(StrictModel):
    """A prompt to keep from eviction, for ``ttl`` seconds or until released; the tenant is selected as in clear_cache."""

    prompt: Annotated[str, Field(min_length=1)]
    ttl: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    api_key: str | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None


class PinState(BaseModel):
    """A pin; not active is one from before a restart whose prompt was not used since, or of less than a block of tokens."""

    id: str
    tokens: int
    expires_in: float | None
    active: bool


class PinList(BaseModel):
    """The pins."""

    pins: list[PinState]


def insight_routes(service: Service, llm: AsyncLLM) -> APIRouter:
    """The endpoints for one engine; all need the admin key."""
    router = APIRouter(prefix="/admin", tags=["administration"], dependencies=[Depends(administrator)])

    def listed(engine: Engine) -> list[PinState]:
        return [
            PinState(id=pin.name, tokens=pin.num_tokens, expires_in=pin.expires_in, active=pin.active)
            for pin in engine.pins.listed()
        ]

    @router.get("/snapshot")
    async def snapshot() -> Response:
        """All that is cached, of every tenant, with texts, for `radixkv inspect`. No step runs while it is taken."""
        return Response(await snapshot_json(llm), media_type="application/json")

    @router.get("/pins")
    async def list_pins() -> PinList:
        """The pins, with those from before a restart that are not in force yet."""
        return PinList(pins=await llm.call(listed))

    @router.post("/pins")
    async def pin(body: PinRequest) -> PinState:
        """Keep a prompt from eviction; what of it is not cached is computed first. 409: the pin quota would be exceeded."""
        tenant = service.tenants.selected_by_admin(body.api_key)
        with client_errors({"prompts": "prompt", "prompt_token_ids": "prompt"}):
            service.check_length("prompt", body.prompt)
            (parsed,) = await llm.run_tokenizer(lambda loaded: as_prompts(body.prompt, loaded), tenant=None)
            prompt = Prompt(parsed.token_ids, parsed.text, tenant.namespace(body.cache_salt))
            try:
                made = await llm.pin_prompt(prompt, body.ttl)
            except PinQuotaExceeded as error:
                raise ApiError(HTTPStatus.CONFLICT, f"prompt: {error}", param="prompt") from error
        name = await llm.call(lambda engine: engine.pins.name_of(made))
        return PinState(id=name or "", tokens=made.num_tokens, expires_in=body.ttl, active=not made.released)

    @router.delete("/pins/{name}")
    async def release(name: str) -> PinList:
        """Make a pinned prompt evictable again; returns the pins that are left."""

        def release_pin(engine: Engine) -> list[PinState] | None:
            return listed(engine) if engine.pins.release_named(name) else None

        left = await llm.call(release_pin)
        if left is None:
            raise ApiError(HTTPStatus.NOT_FOUND, f"id: no pin {name!r} is active", param="id")
        return PinList(pins=left)

    return router


async def snapshot_json(llm: AsyncLLM) -> str:
    """A `CacheSnapshot` of an engine, as JSON: all that is cached, of every tenant, with texts.

    Raises:
        ValueError: the model has no tokenizer.
        EngineDeadError: the engine has died.
    """
    decode = llm.loaded.require_tokenizer().decode
    snapshot = await llm.call(lambda engine: take_snapshot(engine.cache, decode, engine.pool.block_nbytes))
    return snapshot.to_json()


async def explanations(service: Service, prompts: Sequence[Prompt], tenant: str) -> list[CacheExplanation]:
    """Why no more of the prompts would be reused now; reveals nothing of other tenants or salts.

    Args:
        service: that of the routes.
        prompts: tokenized.
        tenant: on whose behalf.

    Raises:
        ApiError: 501, there are several caches.
        ValueError: too many prompts.
        QueueFullError, DrainingError, EngineDeadError: they may not come in now.
    """
    llm = service.engine
    if llm is None:
        message = "explain_cache: not over several replicas, each of which has a cache of its own"
        raise ApiError(HTTPStatus.NOT_IMPLEMENTED, message, param="explain_cache")
    if len(prompts) > MAX_EXPLAINED:
        raise ValueError(f"explain_cache: expected at most {MAX_EXPLAINED} prompts with it, got {len(prompts)}")
    decoded = await llm.explain_prompts(prompts, tenant=tenant, look_elsewhere=False)
    return [CacheExplanation(text=str(one), **one.as_dict()) for one in decoded]
