"""Keeps the prefixes that one request marked by `cache_control`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from radixkv.prompts import Prompt
from radixkv.server.messages.prefixes import marked_prefixes
from radixkv.server.messages.translation import SECONDS, Breakpoint
from radixkv.server.served import ServedModel


class PrefixKeeper:
    """Keeps the marked prefixes of one request's prompt.

    Args:
        tenant: whose request it is.
        chat: the body of the chat completion.
        breakpoints: the marks.
        prompt: what was submitted.
    """

    def __init__(
        self,
        llm: ServedModel,
        tenant: str,
        chat: Mapping[str, Any],
        breakpoints: Sequence[Breakpoint],
        prompt: Prompt,
    ) -> None:
        self._llm = llm
        self._tenant = tenant
        self._chat = chat
        self._breakpoints = breakpoints
        self._prompt = prompt
        self._prefixes: dict[float, Sequence[int]] = {}

    async def prepare(self) -> None:
        """Find the prefixes, while the engine computes the prompt."""
        if self._breakpoints:
            self._prefixes = await self._llm.run_tokenizer(
                lambda loaded: marked_prefixes(self._chat, self._breakpoints, self._prompt.token_ids, loaded),
                tenant=self._tenant,
                num_prompts=0,
            )

    async def keep(self) -> tuple[int, int]:
        """Pin the prefixes, once the prompt is computed.

        Returns:
            How many tokens are kept for five minutes, and for an hour.
        """
        if not self._prefixes:
            return 0, 0
        keep = partial(self._llm.keep, self._tenant, self._prompt.namespace)
        counts = await asyncio.gather(*(keep(prefix, ttl) for ttl, prefix in self._prefixes.items()))
        kept = dict(zip(self._prefixes, counts, strict=True))
        return kept.get(SECONDS["5m"], 0), kept.get(SECONDS["1h"], 0)
