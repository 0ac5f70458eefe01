"""Keeps the prefixes that one request marked: `cache_control` of Anthropic's API, `prompt_cache_breakpoint` of OpenAI's."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from radixkv.prompts import Prompt
from radixkv.server.chat_request import ChatCompletionRequest
from radixkv.server.marked_prefixes import marked_prefixes
from radixkv.server.prompt_caching import Breakpoint
from radixkv.server.served import ServedModel


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
            num_prompts=0,
        )
        await self._is_computed.wait()
        keep = partial(self._llm.keep, self._tenant, self._prompt.namespace)
        counts = await asyncio.gather(*(keep(prefix, ttl) for ttl, prefix in prefixes.items()))
        return dict(zip(prefixes, counts, strict=True))
