"""`/admin/pins`: prompts that administrators keep from eviction, in the cache of one engine or of several."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Protocol

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from radixkv.cache import PinQuotaExceeded
from radixkv.prompts import ChatOptions, Prompt, as_chat_prompts, as_prompts
from radixkv.server.access.authentication import administrator
from radixkv.server.chat.messages import Messages, as_messages
from radixkv.server.errors import ApiError, client_errors
from radixkv.server.service import Service
from radixkv.server.strict import StrictModel

if TYPE_CHECKING:
    from radixkv.async_llm import AsyncLLM
    from radixkv.engine.engine import Engine


class PinRequest(StrictModel):
    """A prompt, or a conversation as the chat template writes it, to keep from eviction.

    For ``ttl`` seconds, or until it is released. ``api_key`` selects the tenant: its key, or the key's name in the file of
    keys; where there are no keys, it is left out.
    """

    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Messages | None = None
    ttl: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    api_key: str | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None


class PinState(BaseModel):
    """A pin. It is inactive if it is from before a restart and its prompt was not used since, or if it is less than a block.

    Attributes:
        replica: in whose cache it is; None: there is one engine.
    """

    id: str
    tokens: int
    expires_in: float | None
    active: bool
    replica: str | None = None


class PinList(BaseModel):
    """The pins."""

    pins: list[PinState]


class AdministratorPins(Protocol):
    """The administrator's pins, in one engine (`EnginePins`) or several; tenants' requests pin prefixes of their own."""

    async def listed(self) -> list[PinState]:
        """All of them."""

    async def pin(self, prompt: Prompt, ttl: float | None) -> PinState | None:
        """Keep a prompt; its uncached part is computed first.

        Returns:
            None: it was cleared before it could be pinned, or just after.

        Raises:
            PinQuotaExceeded: more would be pinned than may be.
            ValueError, EngineError: as `AsyncLLM.pin_prompt`.
        """

    async def release(self, name: str) -> bool:
        """Release the pin with this id; False: there is none."""


class EnginePins(AdministratorPins):
    """The pins of one engine."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def listed(self) -> list[PinState]:
        def states(engine: Engine) -> list[PinState]:
            return [
                PinState(id=pin.name, tokens=pin.num_tokens, expires_in=pin.expires_in, active=pin.active)
                for pin in engine.pins.listed()
            ]

        return await self._llm.call(states)

    async def pin(self, prompt: Prompt, ttl: float | None) -> PinState | None:
        made = await self._llm.pin_prompt(prompt, ttl)
        name, block_size = await self._llm.call(lambda engine: (engine.pins.name_of(made), engine.cache.block_size))
        if name is None and len(prompt.token_ids) >= block_size:
            return None
        return PinState(id=name or "", tokens=made.num_tokens, expires_in=ttl, active=not made.released)

    async def release(self, name: str) -> bool:
        return await self._llm.call(lambda engine: engine.pins.release_named(name))


def pin_routes(service: Service, pins: AdministratorPins) -> APIRouter:
    """The endpoints; all need the admin key."""
    router = APIRouter(prefix="/admin/pins", tags=["administration"], dependencies=[Depends(administrator)])

    @router.get("")
    async def list_pins() -> PinList:
        """The pins, with those from before a restart that are not in force yet."""
        return PinList(pins=await pins.listed())

    @router.post("")
    async def pin(body: PinRequest) -> PinState:
        """Keep a prompt from eviction; what of it is not cached is computed first.

        409: the pin quota would be exceeded, or the cache was cleared meanwhile.
        """
        tenant = service.tenants.selected_by_admin(body.api_key)
        with client_errors({"prompts": "prompt", "prompt_token_ids": "prompt"}):
            parsed = await _parse(body, service)
            prompt = Prompt(parsed.token_ids, parsed.text, tenant.namespace(body.cache_salt))
            param = "prompt" if body.messages is None else "messages"
            try:
                made = await pins.pin(prompt, body.ttl)
            except PinQuotaExceeded as error:
                raise ApiError(HTTPStatus.CONFLICT, f"{param}: {error}", param=param) from error
            if made is None:
                message = f"{param}: it was cleared from the cache while it was pinned"
                raise ApiError(HTTPStatus.CONFLICT, message, param=param)
            return made

    @router.delete("/{name}")
    async def release(name: str) -> PinList:
        """Make a pinned prompt evictable again; returns the pins that are left."""
        if not await pins.release(name):
            raise ApiError(HTTPStatus.NOT_FOUND, f"id: no pin {name!r} is active", param="id")
        return PinList(pins=await pins.listed())

    return router


async def _parse(body: PinRequest, service: Service) -> Prompt:
    """What is to be pinned, tokenized.

    Raises:
        TypeError, ValueError: it is neither a prompt nor a conversation, or both, or one that the template refuses.
    """
    if body.messages is not None:
        if body.prompt is not None:
            raise ValueError("messages: expected either prompt or messages, got both")
        service.check_chat_length(body.messages, ChatOptions())
        messages = as_messages(body.messages)
        (parsed,) = await service.llm.run_tokenizer(lambda loaded: as_chat_prompts(messages, loaded), num_slots=0)
        return parsed
    if body.prompt is None:
        raise ValueError("prompt: expected a text, or messages, got neither")
    text = body.prompt
    service.check_length("prompt", text)
    (parsed,) = await service.llm.run_tokenizer(lambda loaded: as_prompts(text, loaded), num_slots=0)
    return parsed
