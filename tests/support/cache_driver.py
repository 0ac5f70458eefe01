"""Prompts computed and left in a cache, for tests of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixkv.cache import BlockTable, PrefixCache


def compute(cache: PrefixCache, tokens: Sequence[int], **options: Any) -> BlockTable:
    """Open a sequence and compute all of its prompt."""
    table = cache.open(tokens, **options)
    cache.reserve(table, len(tokens))
    cache.drain_copies()
    cache.append(table, tokens[table.num_tokens :])
    return table


def leave(cache: PrefixCache, tokens: Sequence[int], **options: Any) -> None:
    cache.close(compute(cache, tokens, **options))
    cache.check()


def leave_unchecked(cache: PrefixCache, tokens: Sequence[int]) -> None:
    cache.close(compute(cache, tokens))


def press(cache: PrefixCache, num_blocks: int) -> None:
    """Take that many blocks, so that what is not free is evicted, and give them back."""
    table = cache.open([99], read=False, write=False)
    cache.reserve(table, num_blocks * cache.block_size)
    cache.abort(table)
    cache.check()
