"""Keeps the prefixes that one request marked: `cache_control` of Anthropic's API, `prompt_cache_breakpoint` of OpenAI's."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from radixkv.cache.tokens import common_tokens, encode
from radixkv.model.text_interface import TextInterface
from radixkv.prompts import Prompt
from radixkv.server.chat.messages import ChatMessage, as_messages
from radixkv.server.chat.prompt_caching import Breakpoint
from radixkv.server.chat.request import ChatCompletionRequest
from radixkv.server.served_model import ServedModel

# What may follow a prefix: many templates write nothing without a user's message, or write the last message differently.
_NEXT_MESSAGE: Mapping[str, Any] = MappingProxyType({"role": "user", "content": ""})


class PrefixKeeper:
    """Keeps the marked prefixes of one request's prompt."""

    def __init__(
        self,
        llm: ServedModel,
        tenant: str,
        chat: ChatCompletionRequest,
        breakpoints: Sequence[Breakpoint],
        prompt: Prompt,
    ) -> None:
        self._llm = llm
        self._tenant = tenant
        self._chat = chat
        self._breakpoints = breakpoints
        self._prompt = prompt
        self._is_computed = asyncio.Event()
        self._keeping: asyncio.Task[dict[float, int]] | None = None

    @property
    def is_needed(self) -> bool:
        """Whether the request has marks."""
        return bool(self._breakpoints)

    def begin(self) -> None:
        """Begin to find the prefixes, while the engine computes the prompt; they are pinned from `prompt_is_computed` on."""
        if self._breakpoints:
            self._keeping = asyncio.ensure_future(self._keep())

    def prompt_is_computed(self) -> None:
        """What is to be pinned is cached. Further calls do nothing."""
        self._is_computed.set()

    async def kept(self) -> Mapping[float, int]:
        """Wait until all prefixes are pinned; returns how many tokens are kept, by time to live."""
        return {} if self._keeping is None else await self._keeping

    def close(self) -> None:
        """Give up what is not pinned yet."""
        if self._keeping is not None:
            self._keeping.cancel()

    async def _keep(self) -> dict[float, int]:
        prefixes = await self._llm.run_tokenizer(
            lambda loaded: marked_prefixes(self._chat, self._breakpoints, self._prompt.token_ids, loaded),
            tenant=self._tenant,
            num_slots=0,
        )
        await self._is_computed.wait()
        keep = partial(self._llm.keep, self._tenant, self._prompt.namespace)
        counts = await asyncio.gather(*(keep(prefix, ttl) for ttl, prefix in prefixes.items()))
        return dict(zip(prefixes, counts, strict=True))


def marked_prefixes(
    chat: ChatCompletionRequest, breakpoints: Sequence[Breakpoint], prompt: Sequence[int], loaded: TextInterface
) -> dict[float, Sequence[int]]:
    """The part of a prompt before the last breakpoint of each time to live; empty where the template writes none.

    The template writes the conversation up to the breakpoint by itself and, unless that is already a prefix of the prompt,
    with an empty message after it. The result is the longest prefix that either shares with the prompt.

    Args:
        breakpoints: in the order of the prompt.
        prompt: the tokens of all of it.
    """
    last = {mark.ttl: mark.messages for mark in breakpoints}
    prefixes: dict[float, Sequence[int]] = {}
    for ttl, messages in last.items():
        alone = _written(chat, messages, loaded)
        length = _common_length(alone, prompt)
        if length < len(alone) or not alone:
            length = max(length, _common_length(_written(chat, [*messages, _NEXT_MESSAGE], loaded), prompt))
        prefixes[ttl] = prompt[:length]
    return prefixes


def _written(
    chat: ChatCompletionRequest, messages: Sequence[Mapping[str, Any]], loaded: TextInterface
) -> Sequence[int]:
    """Tokens of other messages in place of the request's; none where the template refuses conversations that end there."""
    body = chat.model_copy(
        update={
            "messages": [ChatMessage.model_validate(dict(message)) for message in messages],
            "add_generation_prompt": False,
            "continue_final_message": False,
        }
    )
    try:
        return body.as_prompt(as_messages(body.messages), body.chat_options, loaded).token_ids
    except (TypeError, ValueError):
        return []


def _common_length(some: Sequence[int], others: Sequence[int]) -> int:
    return common_tokens(encode(some), 0, encode(others))
