"""A broken rule is reported by its number, with the steps that led to it."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable

import pytest
from support.broken_adapters import (
    AltersItsPrompt,
    ChangesOnRefusal,
    ChecksItself,
    CountsWrong,
    EvictsTooMuch,
    ForgetsCopies,
    FreesTwice,
    HoldsABlockTwice,
    IgnoresTokens,
    KeepsTwice,
    MatchesOneTooMany,
    MatchesWholeBlocksOnly,
    Raises,
    RefusesForNothing,
    ReusesEverything,
    SharesAcrossNamespaces,
    found_in,
)

from radixkv.testing import (
    CacheAdapter,
    CheckedCache,
    LiveSequence,
    PrefixCacheAdapter,
    RuleViolation,
    find_violation,
)


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


def test_a_cache_that_alters_its_prompt_is_checked_against_the_prompt() -> None:
    """The altered one was what the sequence should have."""
    sequence = CheckedCache(AltersItsPrompt(4, 2)).open([3, 2, 1])
    assert sequence is not None
    assert sequence.tokens == [3, 2, 1]


def test_our_cache_can_be_driven_so() -> None:
    drive(CheckedCache(PrefixCacheAdapter(12, 4)))


@pytest.mark.parametrize(
    ("adapter", "rule"),
    [
        (ReusesEverything, 5),
        (SharesAcrossNamespaces, 8),
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
        (MatchesOneTooMany, r"of 1 token \[0\] 1 are cached, and match says 2"),
        (ChecksItself, r"the cache's own check raised RuntimeError\('block 0 is held'\) at broken_adapters\.py:\d+"),
    ],
)
def test_the_search_calls_match_and_the_cache_s_own_check(
    kind: Callable[[int, int], CacheAdapter], problem: str
) -> None:
    """It never called match; and any error but an AssertionError from a check ended the search without a story."""
    violation = found_in(kind, max_examples=300)
    assert re.fullmatch(problem, violation.problem)
    assert violation.story


def test_a_cache_that_evicts_more_than_it_lacks_is_found() -> None:
    violation = found_in(EvictsTooMuch)
    assert violation.rule == 6
    assert re.fullmatch(r"blocks .* were evicted, and blocks \d+ are left free", violation.problem)

    class MayEvictMore(EvictsTooMuch):
        evicts_exactly = False

    # Without that, ten examples are enough to find it.
    assert find_violation(MayEvictMore, max_examples=50) is None


def test_a_violation_lists_the_calls_that_led_to_it() -> None:
    cache = CheckedCache(ForgetsCopies(8, 4))
    first = cache.open([1, 2, 3])
    assert first is not None
    cache.compute(first, 3)
    cache.close(first)
    with pytest.raises(RuleViolation) as caught:
        cache.open([1, 2, 9, 9])
    assert caught.value.rule == 3
    assert caught.value.story == [
        "A opens with 3 tokens [1 2 3]: finds 0 cached, in blocks (none)",
        "A computes 3 tokens [1 2 3]: in blocks 0",
        "A closes",
        "B opens with 4 tokens [1 2 9 9]: finds 2 cached, in blocks 1",
    ]


def test_a_report_says_in_which_pool_a_run_can_be_repeated() -> None:
    """It had only the steps, which break no rule in most pools."""
    violation = found_in(CountsWrong, max_examples=50)
    assert re.search(r"\nThis is what happened in a cache of \d blocks? of \d tokens?:\n  1\. A opens", str(violation))
    assert str(pickle.loads(pickle.dumps(violation))) == str(violation)


def test_a_report_says_what_a_refused_call_changed() -> None:
    violation = found_in(ChangesOnRefusal)
    assert re.fullmatch(
        r"the call was refused, and still changed something: .*cached blocks [\d ]+ before, .*cached blocks \(none\) after",
        violation.problem,
    )


def test_a_report_says_how_much_of_a_block_is_copied() -> None:
    """A copy of too few tokens was reported as one of the whole block."""
    cache = CheckedCache(PrefixCacheAdapter(8, 4))
    first = cache.open([1, 2, 3])
    assert first is not None
    cache.compute(first, 3)
    cache.close(first)
    second = cache.open([1, 2, 9, 9])
    assert second is not None
    with pytest.raises(RuleViolation) as caught:
        cache._fail(1, "")
    assert (
        caught.value.story[-1]
        == "B opens with 4 tokens [1 2 9 9]: finds 2 cached, in blocks 1; block 0 is copied to 1 (2 tokens)"
    )


@pytest.mark.parametrize(
    ("kind", "rule", "problem"),
    [
        (ForgetsCopies, 3, r"B reads at position 0, in block \d, a slot that was not written"),
        (HoldsABlockTwice, 2, r"A has block 0 in 2 places: 0 0"),
        (IgnoresTokens, 3, r"B reads at position 0, in block \d, what was written for another prefix"),
    ],
)
def test_a_report_says_what_a_sequence_reads_instead_of_its_own(
    kind: Callable[[int, int], CacheAdapter], rule: int, problem: str
) -> None:
    """All three were reported as rule 3, with the same words."""
    violation = found_in(kind, max_examples=300)
    assert violation.rule == rule
    assert re.fullmatch(problem, violation.problem)


def test_a_report_distinguishes_prompts_from_what_is_generated() -> None:
    """Tokens after the prompt were computed like it, and room for none was reported as a computation of 0 tokens."""
    cache = CheckedCache(PrefixCacheAdapter(8, 4))
    sequence = cache.open([1, 2])
    assert sequence is not None
    for count in (1, 1, 1):
        cache.compute(sequence, count)
    cache.compute(sequence, 0, spare=3)
    cache.generate(sequence, [7])
    with pytest.raises(RuleViolation) as caught:
        cache._fail(1, "")
    assert caught.value.story[1:] == [
        "A computes 1 token [1]: in blocks 0",
        "A computes 1 token [2]: in blocks 0",
        "A reserves room for 0 more: in blocks 0",
        "A reserves room for 3 more: in blocks 0 1",
        "A generates 1 token [7]: in blocks 0 1",
    ]
