"""RadixKV's cache, each time with one thing that goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from radixkv.cache import BlockTable
from radixkv.testing import CacheAdapter, PrefixCacheAdapter, RuleViolation, find_violation, search


def found_in(make_adapter: Callable[[int, int], CacheAdapter], **options: Any) -> RuleViolation:
    """What the search finds in a broken cache, though another run might shrink further."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_NUM_OTHERS", 2)
        violation = find_violation(make_adapter, **options)
    assert violation is not None
    return violation


class Broken(PrefixCacheAdapter):
    """RadixKV's cache, with one thing that goes wrong."""


class ReusesEverything(Broken):
    def open(self, prompt: Sequence[int], namespace: str) -> BlockTable | None:
        return super().open([*prompt, 0], namespace)


class AltersItsPrompt(Broken):
    def open(self, prompt: Sequence[int], namespace: str) -> BlockTable | None:
        assert isinstance(prompt, list)
        prompt.sort()
        return super().open(prompt, namespace)


class SharesAcrossNamespaces(Broken):
    def open(self, prompt: Sequence[int], namespace: str) -> BlockTable | None:
        return super().open(prompt, "")

    def known_sequences(self, namespace: str) -> None:
        return None

    def match(self, prompt: Sequence[int], namespace: str) -> int:
        return self.cache.match(prompt, "")


class ForgetsCopies(Broken):
    def take_copies(self) -> list[Any]:
        super().take_copies()
        return []


class MatchesWholeBlocksOnly(Broken):
    def match(self, prompt: Sequence[int], namespace: str) -> int:
        return super().match(prompt, namespace) // self.block_size * self.block_size


class MatchesOneTooMany(Broken):
    def match(self, prompt: Sequence[int], namespace: str) -> int:
        known = super().match(prompt, namespace)
        return known + 1 if known else known


class ChecksItself(Broken):
    def check(self) -> None:
        if self.cache.num_held_blocks:
            raise RuntimeError("block 0 is held")


class ChangesOnRefusal(Broken):
    def reserve(self, handle: BlockTable, num_tokens: int) -> bool:
        done = super().reserve(handle, num_tokens)
        if not done:
            self.cache.clear()
        return done


class RefusesForNothing(Broken):
    def reserve(self, handle: BlockTable, num_tokens: int) -> bool:
        return num_tokens < self.num_blocks * self.block_size and super().reserve(handle, num_tokens)


class EvictsTooMuch(Broken):
    def reserve(self, handle: BlockTable, num_tokens: int) -> bool:
        before = self.cache.stats.evicted_blocks
        done = super().reserve(handle, num_tokens)
        if self.cache.stats.evicted_blocks > before and self.cache.num_evictable_blocks:
            self.cache._tree.evict(1)
        return done


class Raises(Broken):
    def fork(self, handle: BlockTable) -> BlockTable:
        raise KeyError(handle)


class CountsApart(Broken):
    """Free blocks do not depend on an overridden `ref_counts`."""

    def free_blocks(self) -> list[int]:
        return [block for block, count in enumerate(self.cache.ref_counts()) if not count]


class CountsWrong(CountsApart):
    def ref_counts(self) -> list[int]:
        return [min(count, 2) for count in super().ref_counts()]


class FreesTwice(Broken):
    def free_blocks(self) -> list[int]:
        return super().free_blocks() * 2


class IgnoresTokens(Broken):
    """Finds whatever has been cached of zeros."""

    keeps_closed = False

    def open(self, prompt: Sequence[int], namespace: str) -> BlockTable | None:
        return super().open([0] * len(prompt), namespace)

    def match(self, prompt: Sequence[int], namespace: str) -> int:
        return super().match([0] * len(prompt), namespace)

    def known_sequences(self, namespace: str) -> None:  # type: ignore[override]
        return None


class HoldsABlockTwice(Broken):
    """A sequence's second block is its first."""

    def blocks(self, handle: BlockTable) -> list[int]:
        blocks = super().blocks(handle)
        return [*blocks[:1], *blocks[:1], *blocks[2:]][: len(blocks)]


class KeepsTwice(Broken):
    """Two caches that take turns: what one knows the other computes again."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._num_opened = 0

    def open(self, prompt: Sequence[int], namespace: str) -> BlockTable | None:
        table = super().open(prompt, self._turn(namespace))
        self._num_opened += 1
        return table

    def match(self, prompt: Sequence[int], namespace: str) -> int:
        return super().match(prompt, self._turn(namespace))

    def known_sequences(self, namespace: str) -> list[list[int]]:
        return super().known_sequences(self._turn(namespace))

    def _turn(self, namespace: str) -> str:
        return f"{namespace}, turn {self._num_opened // 2 % 2}"
