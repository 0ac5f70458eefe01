"""The kit finds what it should find, and nothing in a cache that keeps the rules."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import radixkv.testing
from radixkv.cache import LRU, BlockTable, EvictableLeaf
from radixkv.testing import (
    BlockCopy,
    CacheAdapter,
    CheckedCache,
    LiveSequence,
    PrefixCacheAdapter,
    RuleViolation,
    Step,
    cache_machine,
    find_violation,
    policy_machine,
    replay,
    strategies,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import test_an_allocator as example

TestOurCache = cache_machine(PrefixCacheAdapter, max_examples=25).TestCase
TestTheExamplesCache = cache_machine(example.SimpleAdapter, max_examples=50).TestCase


@pytest.fixture(scope="module")
def found_by_the_example() -> dict[str, RuleViolation | None]:
    """What the example, run as a program, finds in each of its caches."""
    found: dict[str, RuleViolation | None] = {}

    def recording(make_adapter: Callable[[int, int], CacheAdapter]) -> RuleViolation | None:
        name = type(make_adapter(1, 1).cache).__name__  # type: ignore[attr-defined]
        found[name] = find_violation(make_adapter)
        return found[name]

    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(radixkv.testing, "find_violation", recording)
        runpy.run_path(example.__file__, run_name="__main__")
    for name, violation in found.items():
        assert f"{name}: {violation or 'no rule is broken'}\n" in printed.getvalue()
    return found


@pytest.mark.parametrize(
    ("name", "rules", "most_steps"),
    [
        ("LeaksOnAbort", {10}, 3),
        ("WritesSharedBlock", {2}, 4),
        ("EvictsBlockInUse", {1, 2, 3, 6}, 5),
    ],
)
def test_the_examples_bugs_are_found_and_told_in_few_steps(
    name: str, rules: set[int], most_steps: int, found_by_the_example: dict[str, RuleViolation | None]
) -> None:
    violation = found_by_the_example[name]
    assert violation is not None
    assert violation.rule in rules
    assert len(violation.story) <= most_steps
    assert "1. A opens with" in str(violation)


class ForksOnly(PrefixCacheAdapter):
    """An allocator without a prefix cache: a sequence shares blocks with its forks, and with nothing else."""

    matches_tokens = deduplicates = keeps_closed = False

    def open(self, prompt: Sequence[int], namespace: str) -> BlockTable | None:
        return self.cache.open(prompt, namespace, read=False, write=False)

    def known_sequences(self, namespace: str) -> list[list[int]]:
        return []


class LeakingForks(ForksOnly):
    def close(self, handle: BlockTable) -> None:
        """Forgets to close."""


def test_an_allocator_without_a_prefix_cache_can_be_tested() -> None:
    assert find_violation(ForksOnly, max_examples=300) is None
    violation = find_violation(LeakingForks, max_examples=300)
    assert violation is not None
    assert violation.rule == 10


def test_nothing_is_found_in_the_examples_correct_cache(found_by_the_example: dict[str, RuleViolation | None]) -> None:
    assert found_by_the_example["SimpleCache"] is None


def test_nothing_is_found_in_our_cache() -> None:
    assert find_violation(PrefixCacheAdapter, max_examples=200) is None


class BelievesItsHash(example.SimpleCache):
    def key(self, prefix: Sequence[int], namespace: str) -> example.Prefix:
        return namespace, (sum(prefix) % 4, len(prefix))


def test_a_cache_that_believes_its_hash_is_found() -> None:
    violation = find_violation(lambda n, size: example.SimpleAdapter(n, size, BelievesItsHash))
    assert violation is not None
    assert violation.rule in (3, 4)


class Newest:
    """A user's policy: the most recently used leaf is evicted first."""

    def __init__(self) -> None:
        self._leaves: list[EvictableLeaf] = []

    def add(self, leaf: EvictableLeaf) -> None:
        self._leaves.append(leaf)

    def remove(self, leaf: EvictableLeaf) -> None:
        self._leaves.remove(leaf)

    def next_leaf(self) -> EvictableLeaf:
        return max(self._leaves, key=lambda leaf: leaf.last_use)

    def leaves(self) -> list[EvictableLeaf]:
        return self._leaves


class Forgetful(Newest):
    """A policy that loses every second leaf."""

    def __init__(self) -> None:
        super().__init__()
        self._num_added = 0

    def add(self, leaf: EvictableLeaf) -> None:
        self._num_added += 1
        if self._num_added % 2:
            super().add(leaf)

    def remove(self, leaf: EvictableLeaf) -> None:
        if leaf in self._leaves:
            super().remove(leaf)


TestOurCacheWithAnotherPolicy = cache_machine(
    lambda n, size: PrefixCacheAdapter(n, size, Newest()), max_examples=25
).TestCase
TestAnotherPolicy = policy_machine(Newest, goes_before=lambda a, b: a.last_use > b.last_use, max_examples=50).TestCase


class Undecided(Newest):
    def next_leaf(self) -> Any:
        return None


def test_a_policy_that_has_no_next_leaf_is_told_so() -> None:
    violation = find_violation(lambda n, size: PrefixCacheAdapter(n, size, Undecided()))
    assert violation is not None
    assert "next_leaf: expected a leaf that was added, got None" in violation.problem


def test_a_policy_that_loses_leaves_is_found() -> None:
    violation = find_violation(lambda n, size: PrefixCacheAdapter(n, size, Forgetful()))
    assert violation is not None
    assert violation.rule == 1
    assert len(violation.story) <= 5
    with pytest.raises(AssertionError):
        policy_machine(Forgetful).TestCase().runTest()


class Broken(PrefixCacheAdapter):
    """RadixKV's cache, with one thing that goes wrong."""


class ReusesEverything(Broken):
    def open(self, prompt: Sequence[int], namespace: str) -> BlockTable | None:
        return super().open([*prompt, 0], namespace)


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


def drive(cache: CheckedCache) -> None:
    """Two tenants, prompts that diverge inside a block, forks, a refusal, eviction."""

    def computed(prompt: list[int], namespace: str = "") -> LiveSequence:
        sequence = cache.open(prompt, namespace)
        assert sequence is not None
        assert cache.compute(sequence, len(prompt))
        return sequence

    first = computed([1, 2, 3, 4, 5, 6])
    second = computed([1, 2, 3, 4, 5, 7], "tenant")
    twin = computed([1, 2, 3, 4, 5, 6])
    for sequence in (first, second, twin):
        cache.close(sequence)
    cache.close(computed([1, 2, 3, 4, 5, 6]))
    third = computed([1, 2, 3, 9])
    child = cache.fork(third)
    assert child is not None
    cache.generate(third, [5])
    cache.generate(child, [6, 7, 8])
    cache.match([1, 2, 3, 4, 5])
    assert not cache.compute(cache.open([8] * 99) or child, 99)
    cache.abort(child)
    cache.finish()
    alone = computed([7] * 48)
    cache.close(alone)
    cache.finish()


def test_our_cache_can_be_driven_so() -> None:
    drive(CheckedCache(PrefixCacheAdapter(12, 4)))


@pytest.mark.parametrize(
    ("adapter", "rule"),
    [
        (ReusesEverything, 5),
        (SharesAcrossNamespaces, 3),
        (ForgetsCopies, 3),
        (MatchesWholeBlocksOnly, 4),
        (MatchesOneTooMany, 4),
        (ChecksItself, 1),
        (ChangesOnRefusal, 7),
        (RefusesForNothing, 7),
        (Raises, 7),
        (CountsWrong, 1),
        (FreesTwice, 10),
        (KeepsTwice, 11),
    ],
)
def test_each_rule_can_be_seen_broken(adapter: Callable[[int, int], CacheAdapter], rule: int) -> None:
    with pytest.raises(RuleViolation) as caught:
        drive(CheckedCache(adapter(12, 4)))
    assert caught.value.rule == rule
    assert caught.value.story


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (MatchesOneTooMany, r"of 1 token \[0\] 1 are known, and match says 2"),
        (ChecksItself, r"the cache's own check raised RuntimeError\('block 0 is held'\)"),
    ],
)
def test_the_search_looks_prompts_up_and_asks_the_cache_s_own_check(
    kind: Callable[[int, int], CacheAdapter], problem: str
) -> None:
    """It never called match; and any error but an AssertionError from a check ended the search without a story."""
    violation = find_violation(kind, max_examples=300)
    assert violation is not None
    assert re.fullmatch(problem, violation.problem)
    assert violation.story


class LosesTheTailOfForks(example.SimpleCache):
    def fork(self, sequence: example.SimpleSequence) -> example.SimpleSequence:
        blocks = sequence.blocks[: len(sequence.tokens) // self.block_size]
        for block in blocks:
            self.owners[block] += 1
        return example.SimpleSequence(sequence.namespace, list(sequence.tokens), blocks)


@pytest.mark.parametrize(
    ("prompt", "problem"), [([5], "B has 0 blocks for 1 tokens"), ([5, 6, 7], "B has 1 blocks for 3 tokens")]
)
def test_a_sequence_with_too_few_blocks_breaks_rule_3(prompt: list[int], problem: str) -> None:
    """numpy refused to compare what is in fewer slots; one token, compared with none, passed."""
    cache = CheckedCache(example.SimpleAdapter(8, 2, LosesTheTailOfForks))
    sequence = cache.open(prompt)
    assert sequence is not None
    cache.compute(sequence, len(prompt))
    with pytest.raises(RuleViolation) as caught:
        cache.fork(sequence)
    assert (caught.value.rule, caught.value.problem) == (3, problem)


@settings(max_examples=30, deadline=None)
@given(strategies.beams("search", width=1))
def test_a_search_of_one_beam_keeps_it(steps: list[Step]) -> None:
    """The only beam was dropped, and then there was none to fork."""
    assert replay(steps, CheckedCache(PrefixCacheAdapter(20, 4))) == 0


def test_token_ids_may_be_numpy_s() -> None:
    """Their tags were computed by a method that only Python's integers have."""
    cache = CheckedCache(PrefixCacheAdapter(8, 2))
    sequence = cache.open(np.array([1, 2, 3]))  # type: ignore[arg-type]
    assert sequence is not None
    assert cache.compute(sequence, 3)
    assert cache.generate(sequence, np.array([1, 2]))  # type: ignore[arg-type]
    cache.finish()


@settings(max_examples=100, deadline=None)
@given(strategies.workloads(), strategies.pool_shapes(max_blocks=40))
def test_workloads_that_read_like_traffic_keep_the_rules(steps: list[Step], shape: strategies.PoolShape) -> None:
    replay(steps, CheckedCache(PrefixCacheAdapter(shape.num_blocks, shape.block_size)))


@given(strategies.prompt_families())
def test_prompts_of_a_family_begin_alike(family: list[list[int]]) -> None:
    assert all(family)


def test_the_story_is_told() -> None:
    cache = CheckedCache(ForgetsCopies(8, 4))
    first = cache.open([1, 2, 3])
    assert first is not None
    cache.compute(first, 3)
    cache.close(first)
    with pytest.raises(RuleViolation) as caught:
        cache.open([1, 2, 9, 9])
    assert caught.value.rule == 3
    assert caught.value.story == [
        "A opens with 3 tokens [1 2 3]: finds 0 known, in blocks (none)",
        "A computes 3 tokens [1 2 3]: in blocks 0",
        "A closes",
        "B opens with 4 tokens [1 2 9 9]: finds 2 known, in blocks 1",
    ]


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


def test_hypothesis_is_only_needed_by_what_uses_it() -> None:
    program = (
        "import sys; sys.modules['hypothesis'] = None; import radixkv.testing as kit; "
        "kit.CheckedCache(kit.PrefixCacheAdapter(4, 4)).finish(); kit.find_violation(kit.PrefixCacheAdapter, max_examples=1)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", ["cache_machine", "policy_machine", "strategies"])
def test_what_needs_hypothesis_says_how_to_install_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    for module in ("machine", "policies", "strategies"):
        monkeypatch.delitem(sys.modules, f"radixkv.testing.{module}", raising=False)
    monkeypatch.delattr(radixkv.testing, "strategies", raising=False)
    with pytest.raises(ImportError, match=rf"^{name}: hypothesis is not installed: pip install 'radixkv\[testing\]'$"):
        getattr(radixkv.testing, name)
