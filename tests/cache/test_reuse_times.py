"""Survival tables against a count over all idle times, and their estimates long before most idle times have ended."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.cache.eviction import reuse_times
from radixkv.cache.eviction.reuse_times import AGE_BORDERS, ReuseTimes, hit_densities

PRIOR = 50.0
NO_PRIOR = 1e-9
SHAPE = (2, 1, 1)

# Group, blocks, start, and length; an end after the end of the day is not seen.
IdleTimes = list[tuple[int, int, int, int]]
IDLE_TIMES = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 9), st.integers(0, 40), st.integers(1, 80)), max_size=40
)
END_OF_DAY = 60


def learn(idle_times: IdleTimes, ask_at: list[int]) -> ReuseTimes:
    """Observe the idle times in order, and compute the table at times in between, which ends epochs."""
    table = ReuseTimes(SHAPE)
    events = [(idle[2], 1, idle) for idle in idle_times]
    events += [(idle[2] + idle[3], 0, idle) for idle in idle_times]
    events += [(time, 2, (0, 0, 0, 0)) for time in ask_at]
    for time, kind, (group, num_blocks, start, _) in sorted(events):
        if time > END_OF_DAY:
            break
        if kind == 0:
            table.end(group, num_blocks, start, time)
        elif kind == 1:
            table.begin(group, num_blocks, time)
        else:
            table.returns(float(time), NO_PRIOR)
    return table


def test_blocks_may_have_been_idle_for_long_when_it_is_learned() -> None:
    """Those of a pin that ends, which is no use, are."""
    at_once, later = ReuseTimes(SHAPE), ReuseTimes(SHAPE)
    for table in (at_once, later):
        table.begin(0, 5, 1.0)
        if table is at_once:
            table.begin(0, 4, 1.0)
        table.returns(2.0, NO_PRIOR)  # ends an epoch
        table.begin(0, 3, 20.0)
        if table is later:
            table.begin(0, 4, 1.0)
        table.end(0, 4, 1.0, 21.0)
    assert later.returns(22.0, NO_PRIOR) == pytest.approx(at_once.returns(22.0, NO_PRIOR), rel=1e-3)


def kaplan_meier(idle_times: IdleTimes, group: int) -> list[float]:
    """The probability of ending in each bin that was reached, from the definition."""
    lasting, returns = 1.0, []
    for age_bin in range(len(AGE_BORDERS)):
        ended = at_risk = 0.0
        for own, num_blocks, start, length in idle_times:
            seen = min(length, END_OF_DAY - start)
            reached = bisect_left(AGE_BORDERS, seen)
            if own != group or reached < age_bin:
                continue
            over = length <= END_OF_DAY - start
            at_risk += num_blocks * (1.0 if over or reached > age_bin else 0.5)
            ended += num_blocks if over and reached == age_bin else 0
        if not at_risk:
            break
        chance = ended / at_risk
        returns.append(lasting * chance)
        lasting *= 1 - chance
    return returns


@pytest.fixture(autouse=True)
def _no_shrinkage_and_no_fading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse_times, "_PRIOR_OF_ALL", NO_PRIOR)
    monkeypatch.setattr(reuse_times, "_HALF_LIFE", 1e300)


@given(idle_times=IDLE_TIMES)
def test_tables_are_kaplan_and_meiers(idle_times: IdleTimes) -> None:
    # One epoch per moment, so that every beginning is exact.
    returns = learn(idle_times, ask_at=list(range(END_OF_DAY))).returns(float(END_OF_DAY), NO_PRIOR)
    for group in (0, 1):
        expected = kaplan_meier([idle for idle in idle_times if idle[2] <= END_OF_DAY], group)
        np.testing.assert_allclose(returns[group, : len(expected)], expected, atol=1e-6)


@given(idle_times=IDLE_TIMES, ask_every=st.integers(1, 9), max_epochs=st.sampled_from([4, 128]))
def test_every_block_is_idle_or_has_ended_however_epochs_are_joined(
    idle_times: IdleTimes, ask_every: int, max_epochs: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reuse_times, "_MAX_EPOCHS", max_epochs)
        table = learn(idle_times, list(range(0, END_OF_DAY, ask_every)))
        table.returns(float(END_OF_DAY), NO_PRIOR)
        assert len(table._begun_at) == len(table._weights) <= max_epochs
    for group in (0, 1):
        over = sum(blocks for own, blocks, start, length in idle_times if own == group and start + length <= END_OF_DAY)
        begun = sum(blocks for own, blocks, *_ in idle_times if own == group)
        assert table._ended[group].sum() == pytest.approx(over)
        assert table._idle.sum(axis=0)[group] == pytest.approx(begun - over)


def test_idle_times_that_begin_when_an_epoch_ends_are_found_again() -> None:
    table = ReuseTimes(SHAPE)
    table.begin(0, 1, 5.0)
    table.returns(5.0, NO_PRIOR)
    table.begin(0, 1, 5.0)
    table.begin(0, 1, 9.0)
    table.end(0, 1, 9.0, 10.0)
    assert table._begun_at == [5.0, 9.0]
    assert table._idle[:2, 0].tolist() == [2.0, 0.0]


def test_neighbours_among_old_epochs_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse_times, "_MAX_EPOCHS", 8)
    monkeypatch.setattr(reuse_times, "_HALF_LIFE", 1.0)
    table = ReuseTimes(SHAPE)
    for epoch in range(8):
        table.begin(0, epoch + 1, float(epoch))
        table.returns(float(epoch), NO_PRIOR)
    weights = [0.5**age for age in range(8, 0, -1)]
    counts = [(epoch + 1) * weight for epoch, weight in enumerate(weights)]
    assert table._begun_at == [0.0, 2.0, 4.0, 5.0, 6.0, 7.0]
    assert table._weights == pytest.approx([sum(weights[0:2]) / 2, sum(weights[2:4]) / 2, *weights[4:]])
    assert table._idle[:, 0] == pytest.approx([sum(counts[0:2]), sum(counts[2:4]), *counts[4:], 0, 0])


def test_reuse_after_a_minute_is_estimated_while_most_are_still_idle() -> None:
    idle_times = [(0, 1, start, 60 if start % 2 else 1000) for start in range(0, 90)]
    table = ReuseTimes(SHAPE)
    for second in range(100):
        for group, blocks, start, length in idle_times:
            if start + length == second:
                table.end(group, blocks, start, second)
            if start == second:
                table.begin(group, blocks, start)
        table.returns(float(second), NO_PRIOR)
    returns = table.returns(100.0, NO_PRIOR)
    assert table._ended[0].sum() == pytest.approx(20)  # of 90 in all
    assert returns[0, : bisect_left(AGE_BORDERS, 60) + 1].sum() == pytest.approx(0.5, abs=0.08)


def test_few_idle_times_of_a_group_weigh_little_against_many_of_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse_times, "_PRIOR_OF_ALL", 50.0)
    table = ReuseTimes((1, 1, 2))
    for _ in range(1000):
        table.begin(0, 1, 0.0)
        table.end(0, 1, 0.0, 1.0)
    table.begin(1, 1, 0.0)
    assert table.returns(1000.0, PRIOR)[1].sum() > 0.9


def test_ages_that_few_reached_are_not_judged_by_groups_that_are_never_reused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reuse_times, "_PRIOR_OF_ALL", 50.0)
    table = ReuseTimes((1, 1, 2))
    for _ in range(10_000):
        table.begin(0, 1, 0.0)
    table.returns(0.0, PRIOR)
    for _ in range(100):
        table.begin(1, 1, 10_000.0)
    for _ in range(50):  # the others have not reached the next bin yet
        table.end(1, 1, 10_000.0, 10_060.0)
    returns = table.returns(10_061.0, PRIOR)
    age_bin = bisect_left(AGE_BORDERS, 60.0)
    assert returns[1, age_bin : age_bin + 2].tolist() == pytest.approx([0.4, 0.22], abs=0.05)


def test_the_density_is_the_best_ratio_of_hits_to_space_that_any_stop_gives() -> None:
    returns = np.zeros((1, len(AGE_BORDERS)))
    age_bin = bisect_left(AGE_BORDERS, 60.0)
    returns[0, age_bin] = 0.4
    densities = hit_densities(returns)[0]
    begins, ends = AGE_BORDERS[age_bin - 1], AGE_BORDERS[age_bin]
    assert densities[0] == pytest.approx(0.4 / (begins + 0.8 * (ends - begins)))
    assert densities[age_bin] == pytest.approx(0.4 / (0.8 * (ends - begins)))
    assert not densities[age_bin + 1 :].any()
    assert (np.diff(densities[: age_bin + 1]) > 0).all()
