"""The kit finds what it should find, and nothing in a cache that keeps the rules."""

from __future__ import annotations

import contextlib
import io
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from support.broken_adapters import found_in
from support.example_allocator import example

import radixkv.testing
from radixkv.cache import BlockTable, EvictableLeaf
from radixkv.testing import (
    CacheAdapter,
    CheckedCache,
    PrefixCacheAdapter,
    RuleViolation,
    Step,
    cache_machine,
    find_violation,
    policy_machine,
    replay,
    strategies,
)

TestOurCache = cache_machine(PrefixCacheAdapter, max_examples=25).TestCase
TestTheExamplesCache = cache_machine(example.SimpleAdapter, max_examples=50).TestCase


@pytest.fixture(scope="module")
def found_by_the_example() -> dict[str, RuleViolation | None]:
    """What the example, run as a program, finds in each of its caches."""
    found: dict[str, RuleViolation | None] = {}

    def recording(make_adapter: Callable[[int, int], CacheAdapter]) -> RuleViolation | None:
        name = type(make_adapter(1, 1).cache).__name__  # type: ignore[attr-defined]
        found[name] = find_violation(make_adapter, max_examples=300)  # of 2,000, which find no more
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
def test_the_examples_bugs_are_found_and_reported_in_few_steps(
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
    violation = found_in(LeakingForks, max_examples=300)
    assert violation.rule == 10


def test_nothing_is_found_in_the_examples_correct_cache(found_by_the_example: dict[str, RuleViolation | None]) -> None:
    assert found_by_the_example["SimpleCache"] is None


def test_nothing_is_found_in_our_cache() -> None:
    assert find_violation(PrefixCacheAdapter, max_examples=200) is None


class ComparesHashesAlone(example.SimpleCache):
    def key(self, prefix: Sequence[int], namespace: str) -> example.Prefix:
        return namespace, (sum(prefix) % 4, len(prefix))


def test_a_cache_that_compares_hashes_alone_is_found() -> None:
    violation = found_in(lambda n, size: example.SimpleAdapter(n, size, ComparesHashesAlone))
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


def test_a_policy_without_a_next_leaf_is_reported() -> None:
    violation = found_in(lambda n, size: PrefixCacheAdapter(n, size, Undecided()))
    assert "next_leaf: expected a leaf that was added, got None" in violation.problem


def test_a_policy_that_loses_leaves_is_found() -> None:
    violation = find_violation(lambda n, size: PrefixCacheAdapter(n, size, Forgetful()))
    assert violation is not None
    assert violation.rule == 1
    assert len(violation.story) <= 5
    with pytest.raises(AssertionError):
        policy_machine(Forgetful).TestCase().runTest()


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
def test_no_prompt_of_a_family_is_empty(family: list[list[int]]) -> None:
    assert all(family)


def test_hypothesis_is_only_needed_by_what_uses_it() -> None:
    program = (
        "import sys; sys.modules['hypothesis'] = None; import radixkv.testing as kit; kit.FakeLeaf(1, 1); "
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
