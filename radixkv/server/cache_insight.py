"""What may be seen of the cache and asked of it over HTTP: snapshots, pins, and why a prompt was not reused."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel, Field

from radixkv.cache import Pin, PinQuotaExceeded
from radixkv.engine.engine import Engine
from radixkv.observe.explain import in_words
from radixkv.observe.inspect.snapshot import take_snapshot
from radixkv.prompts import Prompt, as_prompts
from radixkv.sampling_params import SamplingParams
from radixkv.server.errors import ApiError, client_errors
from radixkv.server.service import Service
from radixkv.server.strict import Strict
from radixkv.server.tenants import Credentials


class CacheExplanation(BaseModel):
    """What of a prompt was known when the request came, and why not more; the fields of `PromptExplanation.as_dict`."""

    text: str
    num_prompt_tokens: int
    num_reused_tokens: int
    computed: list[dict[str, Any]]
    difference: dict[str, Any] | None


class PinRequest(Strict):
    """A prompt to keep from eviction, for ``ttl`` seconds or until it is released; whose it is, as in clear_cache."""

    prompt: Annotated[str, Field(min_length=1)]
    ttl: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    api_key: str | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None


class PinState(BaseModel):
    """A pin in force."""

    id: str
    tokens: int
    expires_in: float | None


class PinList(BaseModel):
    """The pins that are in force."""

    pins: list[PinState]


def insight_routes(service: Service) -> APIRouter:
    """The endpoints; all need the admin key."""
    router = APIRouter(prefix="/admin", tags=["administration"])
    llm = service.llm
    names = itertools.count()
    # Touched on the engine's thread only.
    pins: dict[str, Pin] = {}

    def states(engine: Engine) -> list[PinState]:
        in_force = set(engine.cache.pins())
        for name in [name for name, pin in pins.items() if pin not in in_force]:
            del pins[name]
        now = engine.cache.now()
        return [
            PinState(
                id=name, tokens=pin.num_tokens, expires_in=None if pin.expires_at is None else pin.expires_at - now
            )
            for name, pin in pins.items()
        ]

    @router.get("/snapshot")
    async def snapshot(credentials: Credentials) -> Response:
        """All that is cached, of every tenant, with texts, for `radixkv inspect`. The engine waits while it is taken."""
        service.tenants.authenticate_admin(credentials)
        decode = llm.loaded.require_tokenizer().decode
        taken = await llm.call(lambda engine: take_snapshot(engine.cache, decode, engine.pool.block_nbytes))
        return Response(taken.to_json(), media_type="application/json")

    @router.get("/pins")
    async def list_pins(credentials: Credentials) -> PinList:
        """The pins that are in force."""
        service.tenants.authenticate_admin(credentials)
        return PinList(pins=await llm.call(states))

    @router.post("/pins")
    async def pin(body: PinRequest, credentials: Credentials) -> PinState:
        """Keep a prompt from eviction; what is not cached of it is computed first. 409: it would be over the quota."""
        service.tenants.authenticate_admin(credentials)
        tenant = service.tenants.named_by_admin(body.api_key)
        with client_errors({"prompts": "prompt", "prompt_token_ids": "prompt"}):
            service.check_length("prompt", body.prompt)
            (given,) = await llm.run_tokenizer(lambda loaded: as_prompts(body.prompt, loaded))
            prompt = Prompt(given.token_ids, given.text, tenant.namespace(body.cache_salt))
            (stream,) = await llm.submit([prompt], SamplingParams(max_tokens=1, temperature=0.0))
        try:
            async for _ in stream:
                pass
        finally:
            stream.close()

        def keep(engine: Engine) -> PinState:
            name = f"pin-{next(names)}"
            pins[name] = engine.cache.pin(prompt.token_ids, prompt.namespace, body.ttl)
            return next(
                (state for state in states(engine) if state.id == name),
                PinState(id=name, tokens=0, expires_in=body.ttl),
            )

        try:
            return await llm.call(keep)
        except PinQuotaExceeded as error:
            raise ApiError(HTTPStatus.CONFLICT, f"prompt: {error}", param="prompt") from error

    @router.delete("/pins/{name}")
    async def release(name: str, credentials: Credentials) -> PinList:
        """Let a pinned prompt be evicted again; the pins that are left."""
        service.tenants.authenticate_admin(credentials)

        def let_go(engine: Engine) -> list[PinState] | None:
            states(engine)
            pin = pins.pop(name, None)
            if pin is None:
                return None
            engine.cache.release(pin)
            return states(engine)

        left = await llm.call(let_go)
        if left is None:
            raise ApiError(HTTPStatus.NOT_FOUND, f"id: no pin {name!r} is in force", param="id")
        return PinList(pins=left)

    return router


async def explanations(service: Service, prompts: Sequence[Prompt]) -> list[CacheExplanation]:
    """Why no more of the prompts would be reused now; nothing of other tenants or salts shows."""

    def explain(engine: Engine) -> list[CacheExplanation]:
        decode = engine.loaded.require_tokenizer().decode
        found = []
        for prompt in prompts:
            read = prompt.read_cache and engine.enable_prefix_caching
            found_out = engine.cache.explain(prompt.token_ids, prompt.namespace, read, look_elsewhere=False)
            words = in_words(found_out, list(prompt.token_ids), decode)
            found.append(CacheExplanation(text=str(words), **words.as_dict()))
        return found

    return await service.llm.call(explain)
