"""The machine that tests eviction policies treats them as a cache does."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
from hypothesis import Phase, settings

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


class FindsAgainByKey:
    """Keeps leaves under a key that it computes anew to remove them."""

    attribute = "uses"

    def __init__(self) -> None:
        self._leaves: dict[tuple[int, float, int], EvictableLeaf] = {}

    def _key(self, leaf: EvictableLeaf) -> tuple[int, float, int]:
        return getattr(leaf, self.attribute), leaf.last_use, id(leaf)

    def add(self, leaf: EvictableLeaf) -> None:
        self._leaves[self._key(leaf)] = leaf

    def remove(self, leaf: EvictableLeaf) -> None:
        del self._leaves[self._key(leaf)]

    def next_leaf(self) -> EvictableLeaf:
        return self._leaves[min(self._leaves)]

    def leaves(self) -> Collection[EvictableLeaf]:
        return self._leaves.values()


class ByDepth(FindsAgainByKey):
    attribute = "depth"


class ByUsesOfParent(FindsAgainByKey):
    attribute = "parent_uses"


def run_without_shrinking(policy: Callable[[], EvictionPolicy]) -> None:
    """Stops at the first failure; shrinking it takes seconds."""
    machine = policy_machine(policy, max_examples=100)
    machine.TestCase.settings = settings(machine.TestCase.settings, phases=(Phase.generate,))
    machine.TestCase().runTest()


@pytest.mark.parametrize("policy", [ByDepth, ByUsesOfParent])
def test_a_policy_that_keys_leaves_by_what_changes_is_found(policy: Callable[[], EvictionPolicy]) -> None:
    """In the machine, nothing of a leaf in the index changed but its number of blocks; in a cache, these failed."""
    with pytest.raises(KeyError):
        run_without_shrinking(policy)


def test_a_policy_may_rely_on_what_does_not_change() -> None:
    policy_machine(FindsAgainByKey, max_examples=30).TestCase().runTest()


class NeverRemoves(LRU):
    def remove(self, leaf: EvictableLeaf) -> None:
        """Keeps it."""


def test_a_policy_with_other_leaves_than_were_added_is_reported_with_both() -> None:
    with pytest.raises(
        AssertionError, match=r"^leaves: expected \[.*\], got \[leaf of \d blocks, last used at \d+.*\]"
    ):
        run_without_shrinking(NeverRemoves)


@pytest.mark.parametrize("policy", [Clocked, CountsIdleBlocks])
def test_a_policy_gets_its_clock_and_is_notified_of_evictions(policy: Callable[[], EvictionPolicy]) -> None:
    """The machine broke the contract that it tests: it gave no clock, and evicted leaves unseen by what learns from them."""
    policy_machine(policy, max_examples=30).TestCase().runTest()
