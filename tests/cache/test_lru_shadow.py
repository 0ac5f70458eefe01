"""What LRU would hit is known without a second cache, and the learning policy falls back to LRU where LRU hits more."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.cache import LRU, Adaptive, EvictionPolicy
from radixkv.cache.eviction.lru_shadow import LRUShadow
from radixkv.observe.simulate.replay import replay
from radixkv.observe.simulate.synthetic import SYNTHETIC
from radixkv.testing import FakeLeaf


class WithShadow(Adaptive):
    """Keeps the whole comparison with LRU."""

    def __init__(self) -> None:
        super().__init__()
        self._lru = Recording()


class Recording(LRUShadow):
    def __init__(self) -> None:
        super().__init__()
        self.more_hits = 0

    def end(self, num_blocks: int, idle_since: float, evicted: bool) -> None:
        before = self._difference
        super().end(num_blocks, idle_since, evicted)
        self.more_hits += round(self._difference - before)


def hits(trace: str, num_blocks: int, policy: EvictionPolicy) -> int:
    return sum(replay(SYNTHETIC[trace](1200), num_blocks, policy))


@pytest.mark.slow
@pytest.mark.parametrize("trace", ["chats", "agents"])
def test_the_shadow_knows_what_lru_would_hit(trace: str) -> None:
    policy = WithShadow()
    own, lru = hits(trace, 400, policy), hits(trace, 400, LRU())
    assert isinstance(policy._lru, Recording)
    # Not exactly: of prefixes that were used at the same moment, LRU evicts what comes last.
    assert abs(own + policy._lru.more_hits - lru) < 0.005 * lru


def test_what_lru_forgets_is_the_oldest() -> None:
    shadow = LRUShadow()
    shadow.begin(10, 1.0)
    shadow.begin(10, 2.0)
    shadow.evict(12)  # the cache evicts 12 blocks; LRU would evict all of 1.0, and two of 2.0
    shadow.end(10, 1.0, evicted=False)
    assert shadow.advantage == -1.0  # ten hits that LRU has not
    shadow.end(10, 2.0, evicted=True)
    assert -1.0 < shadow.advantage < 0  # eight that only LRU still has
    assert shadow._idle == {}


def test_what_was_pinned_is_as_old_for_the_shadow_as_for_lru() -> None:
    """The end of a pin made it the youngest there, and the oldest for LRU itself."""
    shadow = LRUShadow()
    for since in (10.0, 30.0, 20.0, 5.0):
        shadow.begin(4, since)
    shadow.evict(8)
    shadow.begin(4, 40.0)  # forgets what exceeds the cache
    assert [*shadow._idle] == [20.0, 30.0, 40.0]


def test_pins_that_end_together_take_time_that_grows_with_their_number() -> None:
    """Each was put in its place among all idle times: 4,000 that ended at once took two seconds."""

    class Moment(float):
        num_compared = 0
        __hash__ = float.__hash__

        def __lt__(self, other: float) -> bool:
            Moment.num_compared += 1
            return float(self) < float(other)

        def __gt__(self, other: float) -> bool:
            Moment.num_compared += 1
            return float(self) > float(other)

    each = []
    for count in (50, 200):
        shadow, Moment.num_compared = LRUShadow(), 0
        for second in range(count):
            shadow.begin(1, Moment(1000 + second))
        for second in range(count):
            shadow.begin(1, Moment(second))
        shadow.evict(1)
        assert next(iter(shadow._idle)) == 1
        each.append(Moment.num_compared / count)
    assert each[1] < 2 * each[0]


def test_what_is_replaced_is_forgotten_by_both() -> None:
    shadow = LRUShadow()
    shadow.begin(3, 1.0)
    shadow.replace(1, 1.0)
    shadow.end(2, 1.0, evicted=False)
    assert shadow.advantage == 0.0


def test_the_oldest_leaf_is_evicted_first_unless_another_promises_much_less() -> None:
    policy = Adaptive()
    random = np.random.default_rng(0)
    leaves = [FakeLeaf(float(second), 1, uses=int(random.integers(1, 200))) for second in range(20)]
    for leaf in leaves:
        policy.on_idle(leaf)
        policy.add(leaf)
    policy._densities = [[1.0 + 0.7 * (group % 2)] * len(row) for group, row in enumerate(policy._densities)]
    for leaf in leaves[:10]:
        assert policy.next_leaf() is leaf
        policy.remove(leaf)
    worst = leaves[15]
    policy._densities[worst.group] = [0.5] * len(policy._densities[0])
    policy._candidates = dict.fromkeys(policy._candidates)
    found = policy.next_leaf()
    assert isinstance(found, FakeLeaf)
    assert found.group == worst.group


def test_the_margin_grows_while_lru_is_ahead_and_goes_back_when_it_is_not() -> None:
    policy = Adaptive()
    doubt = policy._margin
    for _ in range(9):
        policy._lru.begin(1, 1.0)
        policy._lru.end(1, 1.0, evicted=True)
    policy._refit()
    grown = policy._margin
    assert grown > doubt
    while policy._lru.advantage > 0.5:  # older evidence counts less each time
        policy._refit()
    for _ in range(50):
        policy._refit()
    assert policy._margin == pytest.approx(doubt, rel=0.02)
    for _ in range(60):
        policy._lru.end(1, 0.5, evicted=False)
    for _ in range(50):
        policy._lru.end(1, 0.5, evicted=False)
        policy._refit()
    assert policy._margin == 1.0


@pytest.mark.slow
def test_a_chance_that_groups_do_not_share_costs_nothing_against_lru() -> None:
    trace = SYNTHETIC["mixed"](1500)
    for share in (0.02, 0.1, 0.2):
        num_blocks = int(share * trace.num_distinct_blocks)
        own, lru = (sum(replay(trace, num_blocks, policy)) for policy in (Adaptive(), LRU()))
        assert own >= lru - 0.003 * trace.num_asked_blocks
