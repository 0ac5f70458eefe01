"""What cannot be tested is refused, and an answer that no cache can give names the adapter's method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.broken_adapters import CountsApart

from radixkv.cache import LRU, BlockTable
from radixkv.testing import BlockCopy, CacheAdapter, PrefixCacheAdapter, cache_machine, find_violation, policy_machine


def _without_sizes(num_blocks: int, block_size: int) -> CacheAdapter:
    adapter = PrefixCacheAdapter(num_blocks, block_size)
    del adapter.num_blocks
    return adapter


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *(
            (
                lambda make=make: make(PrefixCacheAdapter(4, 4)),
                "make_adapter: expected a class, or a function of .* got <",
            )
            for make in (find_violation, cache_machine)
        ),
        (lambda: cache_machine(CacheAdapter), "make_adapter: .* got CacheAdapter, which has no abort, blocks, "),
        (lambda: policy_machine("x"), "make_policy: expected a class, or a function of no arguments, got 'x'"),  # type: ignore[arg-type]
        (lambda: find_violation(lambda num_blocks, block_size: None), "adapter: expected a CacheAdapter, got None"),  # type: ignore[arg-type,return-value]
        (lambda: find_violation(_without_sizes), "adapter.num_blocks: expected a whole number of at least 1, got None"),
        (lambda: find_violation(PrefixCacheAdapter, max_examples=0), "max_examples: expected .* at least 1, got 0"),
        *(
            (
                lambda make=make, given=given: make(PrefixCacheAdapter, namespaces=given),
                f"namespaces: expected {message}",
            )
            for make in (find_violation, cache_machine)
            for given, message in [
                ("ab", "a list of strings, got 'ab'"),
                ([None], "strings, got None"),
                ([], "at least one, got none"),
            ]
        ),
        (lambda: cache_machine(PrefixCacheAdapter, max_examples=0), "max_examples: expected .* at least 1, got 0"),
        (lambda: cache_machine(PrefixCacheAdapter, steps=0), "steps: expected .* at least 1, got 0"),
        (lambda: policy_machine(LRU, max_examples=0), "max_examples: expected .* at least 1, got 0"),
    ],
)
def test_what_tests_nothing_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call()


@pytest.mark.parametrize(
    ("method", "answer", "message"),
    [
        ("length", None, "expected a whole number, got None"),
        ("match", "3", "expected a whole number, got '3'"),
        ("reserve", None, "expected True or False, got None"),
        ("take_copies", None, "expected BlockCopy objects, got None"),
        ("take_copies", [(0, 1, 4)], r"expected BlockCopy objects, got \(0, 1, 4\)"),
        ("blocks", None, "expected block ids, got None"),
        ("free_blocks", ["0"], "expected block ids, got '0'"),
        ("cached_blocks", 5, "expected block ids, got 5"),
        ("take_copies", [BlockCopy("a", 0, 1)], "expected block ids, got 'a'"),  # type: ignore[arg-type]
        ("take_copies", [BlockCopy(0, 0, None)], "expected a whole number, got None"),  # type: ignore[arg-type]
        ("ref_counts", 7, "expected numbers or None, got 7"),
        ("ref_counts", ["a"], "expected a whole number, got 'a'"),
        ("known_sequences", 5, "expected sequences of tokens or None, got 5"),
        ("known_sequences", [5], "expected sequences of tokens or None, got 5"),
    ],
)
def test_an_answer_of_another_type_names_the_adapter_s_method(method: str, answer: Any, message: str) -> None:
    kind: Any = type("Mine", (CountsApart,), {method: lambda *_: answer})
    with pytest.raises(TypeError, match=rf"^Mine\.{method}: {message}$"):
        find_violation(kind)


class Shifted(PrefixCacheAdapter):
    """A cache whose blocks have other ids."""

    shift: int

    def blocks(self, handle: BlockTable) -> list[int]:
        return [block + self.shift for block in super().blocks(handle)]

    def free_blocks(self) -> list[int]:
        return [block + self.shift for block, count in enumerate(self.cache.ref_counts()) if not count]

    def cached_blocks(self) -> list[int]:
        return [block + self.shift for block in super().cached_blocks()]

    def take_copies(self) -> list[BlockCopy]:
        return [BlockCopy(c.source + self.shift, c.target + self.shift, c.num_tokens) for c in super().take_copies()]

    def ref_counts(self) -> None:  # type: ignore[override]
        return None


class BelowZero(Shifted):
    shift = -1


class FromOne(Shifted):
    shift = 1


class HidesALeak(Shifted):
    shift = 0

    def free_blocks(self) -> list[int]:
        return [*super().free_blocks()[1:], 99]


class CopiesTooMuch(PrefixCacheAdapter):
    def take_copies(self) -> list[BlockCopy]:
        return [BlockCopy(c.source, c.target, c.num_tokens + 5) for c in super().take_copies()]


class CountsNothing(CountsApart):
    def ref_counts(self) -> list[int]:
        return []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (BelowZero, r"BelowZero\.free_blocks: expected block ids from 0 to \d+, got -1"),
        (FromOne, r"FromOne\.free_blocks: expected block ids from 0 to \d+, got \d+"),
        (HidesALeak, r"HidesALeak\.free_blocks: expected block ids from 0 to \d+, got 99"),
        (CopiesTooMuch, r"CopiesTooMuch\.take_copies: expected copies of at most \d tokens, got BlockCopy.*"),
        (CountsNothing, r"CountsNothing\.ref_counts: expected \d+ numbers, one per block, got \[\]"),
    ],
)
def test_an_impossible_answer_names_the_adapter_s_method(
    kind: Callable[[int, int], CacheAdapter], message: str
) -> None:
    """They were believed: numpy takes -1 as the last block, and an id that does not exist stood for one that was lost."""
    with pytest.raises(ValueError, match=f"^{message}$"):
        find_violation(kind)
