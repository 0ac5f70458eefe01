"""The machine that tests eviction policies treats them as a cache does."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from radixkv.cache import LRU, EvictableLeaf, EvictionPolicy
from radixkv.testing import policy_machine


class Clocked(LRU):
    """Like a policy with a time to live, it asks for the time whenever a leaf is needed."""

    clock: Callable[[], float] | None = None

    def use_clock(self, clock: Callable[[], float]) -> None:
        self.clock = clock

    def next_leaf(self) -> EvictableLeaf:
        assert self.clock is not None
        assert self.clock() >= max(leaf.last_use for leaf in self.leaves())
        return super().next_leaf()


class CountsIdleBlocks(LRU):
    """A learner that counts the blocks which are cached and idle."""

    def __init__(self) -> None:
        super().__init__()
        self.num_idle = 0

    def on_idle(self, node: EvictableLeaf) -> None:
        self.num_idle += node.num_blocks

    def on_reuse(self, group: int, num_blocks: int, idle_since: float, now: float, evicted: bool) -> None:
        self.num_idle -= num_blocks

    def on_remove(self, node: EvictableLeaf, start: int, evicted: bool) -> None:
        self.num_idle -= node.num_blocks - start

    def leaves(self) -> Collection[EvictableLeaf]:
        leaves = super().leaves()
        assert self.num_idle == sum(leaf.num_blocks for leaf in leaves)
        return leaves


@pytest.mark.parametrize("policy", [Clocked, CountsIdleBlocks])
def test_a_policy_gets_its_clock_and_is_told_of_evictions(policy: Callable[[], EvictionPolicy]) -> None:
    """The machine broke the contract that it tests: it gave no clock, and evicted leaves unseen by what learns from them."""
    policy_machine(policy, max_examples=30).TestCase().runTest()
