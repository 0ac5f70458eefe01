"""Each request for blocks is refused once: nothing is changed or lost, and work goes on."""

from __future__ import annotations

import pytest
from support.failing_store import FailingOnce

from radixkv.testing import CheckedCache, LiveSequence, PrefixCacheAdapter


def live_through_much(cache: CheckedCache) -> None:
    """Prompts that end in each other's blocks, chunks, forks that diverge, eviction, and a second visit."""

    def grow(sequence: LiveSequence | None, count: int) -> None:
        if sequence is not None:
            cache.compute(sequence, count)
        cache.verify()

    cache.open([8])  # with no other live sequence, a refusal would be a broken rule
    stem = list(range(10))
    for round_number in range(3):
        first = cache.open([*stem, 20, 21])
        grow(first, 7)
        grow(first, 9)
        second = cache.open([*stem, 30])
        grow(second, 3)
        if first is not None:
            child = cache.fork(first)
            cache.generate(first, [40, 41])
            cache.generate(child, [50, 51, 52, 53, 54])
            cache.verify()
            cache.close(child)
            cache.close(first)
            cache.verify()
        if second is not None:
            cache.abort(second)
        grow(cache.open([60 + round_number] * 26), 26)
        for sequence in list(cache.live.values())[1:]:
            cache.close(sequence)


def run(monkeypatch: pytest.MonkeyPatch, fails_at: int) -> tuple[int, CheckedCache]:
    with monkeypatch.context() as patch:
        failing = FailingOnce(patch, fails_at)
        cache = CheckedCache(PrefixCacheAdapter(12, 4))
        live_through_much(cache)
        cache.finish()
    return failing.num_calls, cache


def num_requests() -> int:
    with pytest.MonkeyPatch.context() as patch:
        return run(patch, 0)[0]


NUM_REQUESTS = num_requests()


def test_there_are_points_to_fail_at() -> None:
    assert NUM_REQUESTS >= 12


@pytest.mark.parametrize("fails_at", range(1, NUM_REQUESTS + 1))
def test_a_refusal_changes_and_loses_nothing(monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    num_calls, cache = run(monkeypatch, fails_at)
    assert num_calls >= fails_at
    assert cache.adapter.num_blocks == len(list(cache.adapter.free_blocks()))
