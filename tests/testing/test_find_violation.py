"""The search accuses no correct cache, and loses no violation that it has seen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from support.broken_adapters import KeepsTwice, SharesAcrossNamespaces, found_in
from support.example_allocator import example

from radixkv.cache import BlockTable
from radixkv.testing import BlockCopy, CacheAdapter, PrefixCacheAdapter, cache_machine, find_violation


@dataclass
class Request(example.SimpleSequence):
    """Knows its whole prompt from the beginning, as in caches that schedule requests."""

    prompt: list[int] = field(default_factory=list)


class SchedulesRequests(example.SimpleAdapter):
    """A correct cache that computes prompts as they were opened."""

    def open(self, prompt: Sequence[int], namespace: str) -> Request:
        opened = super().open(prompt, namespace)
        return Request(namespace, opened.tokens, opened.blocks, list(prompt))

    def commit(self, handle: example.SimpleSequence, tokens: Sequence[int]) -> None:
        assert isinstance(handle, Request)
        rest = handle.prompt[len(handle.tokens) :][: len(tokens)]
        assert list(tokens[: len(rest)]) == rest
        super().commit(handle, tokens)

    def fork(self, handle: example.SimpleSequence) -> Request:
        forked = super().fork(handle)
        return Request(forked.namespace, forked.tokens, forked.blocks, list(forked.tokens))


def test_a_prompt_is_computed_before_anything_is_generated() -> None:
    """The search generated in place of what was left of a prompt, and so accused correct caches."""
    assert find_violation(SchedulesRequests, max_examples=200) is None


class CopiesWhenForked(example.SimpleAdapter):
    """A correct cache: a fork has a partly filled block of its own from the beginning."""

    def fork(self, handle: example.SimpleSequence) -> example.SimpleSequence | None:  # type: ignore[override]
        child = self.cache.fork(handle)
        if self.cache.reserve(child, len(child.tokens)):
            return child
        self.cache.abort(child)
        return None


class RefusesForksLate(CopiesWhenForked):
    """Keeps what it took for a fork that it refuses."""

    def fork(self, handle: example.SimpleSequence) -> example.SimpleSequence | None:
        child = self.cache.fork(handle)
        return child if self.cache.reserve(child, len(child.tokens)) else None


def test_a_fork_may_take_blocks_and_be_refused() -> None:
    """There was no way to say that blocks are missing: to raise broke a rule, and so did the fork None."""
    assert find_violation(CopiesWhenForked, max_examples=300) is None
    cache_machine(CopiesWhenForked, max_examples=25).TestCase().runTest()
    violation = found_in(RefusesForksLate)
    assert violation.rule in (1, 7)
    assert re.fullmatch(r"B forks from A at \d+ tokens: refused", violation.story[-1])


class BreaksOnce(PrefixCacheAdapter):
    """The first fork of all fails, and no later one."""

    has_failed = False

    def fork(self, handle: BlockTable) -> BlockTable:
        if not BreaksOnce.has_failed:
            BreaksOnce.has_failed = True
            raise KeyError(handle)
        return super().fork(handle)


def test_a_violation_that_cannot_be_repeated_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search ended with an error of min(): it had repeated the shrunk run for its violation, which did not come again."""
    monkeypatch.setattr(BreaksOnce, "has_failed", False)
    violation = found_in(BreaksOnce)
    assert violation.rule == 7
    assert "forks from" in violation.story[-1]


class KnowsItsTenants(PrefixCacheAdapter):
    """Serves two tenants, and refuses empty prompts."""

    def open(self, prompt: Sequence[int], namespace: str) -> BlockTable | None:
        assert namespace in ("a", "b")
        return super().open(prompt, namespace)

    def match(self, prompt: Sequence[int], namespace: str) -> int:
        assert namespace in ("a", "b")
        assert len(prompt)
        return super().match(prompt, namespace)


TestACacheOfTwoTenants = cache_machine(KnowsItsTenants, namespaces=("a", "b"), max_examples=25).TestCase


def test_only_the_given_namespaces_are_searched() -> None:
    """Prompts that evict others were opened under the empty namespace, and the empty prompt was looked up."""
    assert find_violation(KnowsItsTenants, namespaces=["a", "b"], max_examples=200) is None
    violation = found_in(lambda n, size: example.SimpleAdapter(n, size, example.LeaksOnAbort), namespaces=["b", "a"])
    assert "under 'b'" in violation.story[0]


QUERIES = ["length", "blocks", "free_blocks", "cached_blocks", "ref_counts", "known_sequences", "take_copies"]


@pytest.mark.parametrize("method", QUERIES)
def test_a_query_that_raises_breaks_a_rule(method: str) -> None:
    """Its exception ended the search without a story."""

    def fail(*_: object) -> None:
        raise KeyError(method)

    violation = found_in(type("Fails", (PrefixCacheAdapter,), {method: fail}), max_examples=50)
    assert violation.rule == 7
    assert re.fullmatch(rf"the cache raised KeyError\('{method}'\) at test_find_violation\.py:\d+", violation.problem)


class RaisesLate(PrefixCacheAdapter):
    def cached_blocks(self) -> Iterator[int]:  # type: ignore[override]
        yield from super().cached_blocks()
        raise KeyError("cached")


def test_a_generator_that_raises_breaks_a_rule() -> None:
    violation = found_in(RaisesLate, max_examples=50)
    assert violation.rule == 7
    assert re.fullmatch(r"the cache raised KeyError\('cached'\) at test_find_violation\.py:\d+", violation.problem)


class CopiesTooLittle(example.SimpleAdapter):
    """The last token of a partly filled block is not copied with it."""

    def take_copies(self) -> list[BlockCopy]:
        return [BlockCopy(c.source, c.target, max(1, c.num_tokens - 1)) for c in super().take_copies()]


class TakesCopyFirst(example.SimpleCache):
    """A call that is refused for want of new blocks has a copy of its own of a shared one by then."""

    def reserve(self, sequence: example.SimpleSequence, num_tokens: int) -> bool:
        return super().reserve(sequence, len(sequence.tokens)) and super().reserve(sequence, num_tokens)


@pytest.mark.parametrize(
    ("make_adapter", "rule", "num_steps"),
    [
        (KeepsTwice, 4, 3),
        (SharesAcrossNamespaces, 8, 3),
        (CopiesTooLittle, 3, 4),
        (lambda n, size: example.SimpleAdapter(n, size, TakesCopyFirst), 7, 4),
    ],
)
def test_no_step_of_a_story_could_be_left_out(
    make_adapter: Callable[[int, int], CacheAdapter], rule: int, num_steps: int
) -> None:
    """The end of a run closed and cleared what a step that was left out did; what was generated stayed beside a prompt."""
    violation = find_violation(make_adapter)
    assert violation is not None
    assert (violation.rule, len(violation.story)) == (rule, num_steps), violation
