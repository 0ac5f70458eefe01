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
    """Keeps the marked prefixes of one request's prompt.

    Args:
        tenant: whose request it is.
        chat: the request.
        breakpoints: the marks.
        prompt: what was submitted.
    """

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
        self._prefixes: dict[float, Sequence[int]] = {}
        self._pinning: asyncio.Task[dict[float, int]] | None = None

    @property
    def is_needed(self) -> bool:
        """Whether the request has marks."""
        return bool(self._breakpoints)

    async def prepare(self) -> None:
        """Find the prefixes, while the engine computes the prompt."""
        if self._breakpoints:
            self._prefixes = await self._llm.run_tokenizer(
                lambda loaded: marked_prefixes(self._chat, self._breakpoints, self._prompt.token_ids, loaded),
                tenant=self._tenant,
                num_prompts=0,
            )

    def start(self) -> None:
        """Begin to pin the prefixes, once the prompt is computed; again: do nothing."""
        if self._prefixes and self._pinning is None:
            self._pinning = asyncio.ensure_future(self._pin())

    async def kept(self) -> Mapping[float, int]:
        """Wait until all that `start` began is pinned; returns how many tokens are kept, by time to live."""
        return {} if self._pinning is None else await self._pinning

    def close(self) -> None:
        """Give up what is not pinned yet."""
        if self._pinning is not None:
            self._pinning.cancel()

    async def _pin(self) -> dict[float, int]:
        keep = partial(self._llm.keep, self._tenant, self._prompt.namespace)
        counts = await asyncio.gather(*(keep(prefix, ttl) for ttl, prefix in self._prefixes.items()))
        return dict(zip(self._prefixes, counts, strict=True))
