"""The kit sees blocks that are cached in vain, or that should not be cached at all."""

from __future__ import annotations

import re
from collections.abc import Sequence

from support.broken_adapters import found_in
from support.example_allocator import example

from radixkv.cache import BlockTable
from radixkv.testing import PrefixCacheAdapter, find_violation


class EvictsParentsFirst(example.SimpleCache):
    """Evicts the shortest prefix, and keeps those that go on from it."""

    def allocate(self) -> int:
        if not self.free:
            evictable = (key for key, block in self.cached.items() if self.is_evictable(block))
            self.release(self.cached.pop(min(evictable, key=lambda key: len(key[1]))))
        return super().allocate()


def test_a_cached_block_without_the_one_before_it_is_found() -> None:
    """Only prompts that are known were looked up, and no prompt finds what lies behind an evicted block."""
    violation = find_violation(lambda n, size: example.SimpleAdapter(n, size, EvictsParentsFirst))
    assert violation is not None
    assert violation.rule == 4
    assert re.fullmatch(r"block \d is cached, and the block before it is not", violation.problem)
    assert len(violation.story) <= 6


class CachesAborted(PrefixCacheAdapter):
    """Ends every sequence as if its answer were complete."""

    def abort(self, handle: BlockTable) -> None:
        self.cache.close(handle)


def test_a_cache_that_keeps_what_was_aborted_is_found() -> None:
    violation = found_in(CachesAborted)
    assert violation.rule == 4
    assert violation.problem == "A was aborted, and 1 of its tokens are cached, where 0 were before"
    assert violation.story[-1] == "A is aborted"


class ClearsOnlyWhenIdle(PrefixCacheAdapter):
    """Does nothing when it is cleared while a sequence lives."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._live: list[BlockTable] = []

    def open(self, prompt: Sequence[int], namespace: str) -> BlockTable | None:
        opened = super().open(prompt, namespace)
        self._live += [opened] if opened is not None else []
        return opened

    def fork(self, handle: BlockTable) -> BlockTable:
        child = super().fork(handle)
        self._live.append(child)
        return child

    def close(self, handle: BlockTable) -> None:
        self._live.remove(handle)
        super().close(handle)

    def abort(self, handle: BlockTable) -> None:
        self._live.remove(handle)
        super().abort(handle)

    def clear(self, namespace: str) -> None:
        if not self._live:
            super().clear(namespace)


def test_a_cache_that_keeps_what_was_cleared_is_found() -> None:
    """Only at the end, when no sequence lived, was everything to be free."""
    violation = found_in(ClearsOnlyWhenIdle)
    assert violation.rule == 4
    assert re.fullmatch(r"blocks [\d ]+ are still cached", violation.problem)
    assert violation.story[-1] == "what is cached is cleared"
