"""What LRU would hit is known without a second cache, and the learning policy falls back to LRU where that hits more."""

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


@pytest.mark.parametrize("trace", ["chats", "agents"])
def test_the_shadow_knows_what_lru_would_hit(trace: str) -> None:
    policy = WithShadow()
    own, lru = hits(trace, 400, policy), hits(trace, 400, LRU())
    assert isinstance(policy._lru, Recording)
    # Not exactly: of prefixes that were used at the same moment, LRU evicts what comes last.
    assert abs(own + policy._lru.more_hits - lru) < 0.02 * lru


def test_what_lru_forgets_is_the_oldest() -> None:
    shadow = LRUShadow()
    shadow.begin(10, 1.0)
    shadow.begin(10, 2.0)
    shadow.evict(12)  # of what the cache holds; LRU gives up the block of 1.0, and two of 2.0
    shadow.end(10, 1.0, evicted=False)
    assert shadow.advantage == -1.0  # ten hits that LRU has not
    shadow.end(10, 2.0, evicted=True)
    assert -1.0 < shadow.advantage < 0  # eight that it has
    assert shadow._idle == {}


def test_what_is_replaced_is_forgotten_by_both() -> None:
    shadow = LRUShadow()
    shadow.begin(3, 1.0)
    shadow.replace(1, 1.0)
    shadow.end(2, 1.0, evicted=False)
    assert shadow.advantage == 0.0


def test_while_lru_does_better_the_oldest_leaf_is_evicted_first() -> None:
    policy = Adaptive()
    policy._prior = 25_600.0
    random = np.random.default_rng(0)
    leaves = [FakeLeaf(float(second), 1, uses=int(random.integers(1, 200))) for second in range(20)]
    for leaf in leaves:
        policy.on_idle(leaf)
        policy.add(leaf)
    for leaf in leaves:
        assert policy.next_leaf() is leaf
        policy.remove(leaf)


def test_evidence_for_lru_makes_groups_count_less_and_evidence_against_it_more() -> None:
    policy = Adaptive()
    first = policy._prior
    for _ in range(9):
        policy._lru.begin(1, 1.0)
        policy._lru.end(1, 1.0, evicted=True)
    policy._refit()
    assert policy._prior == 4 * first
    for _ in range(60):
        policy._lru.end(1, 0.5, evicted=False)
    policy._refit()
    assert policy._prior < first
