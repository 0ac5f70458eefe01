"""The contract of an eviction policy, as a state machine: its index holds exactly the leaves that were added."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from radixkv.cache import ClockedPolicy, EvictableLeaf, EvictionPolicy, LearningPolicy
from radixkv.cache.arguments import check_count
from radixkv.cache.observer import handlers
from radixkv.testing.arguments import check_maker
from radixkv.testing.fake_leaf import FakeLeaf


def policy_machine(
    make_policy: Callable[[], EvictionPolicy],
    goes_before: Callable[[EvictableLeaf, EvictableLeaf], bool] | None = None,
    *,
    max_examples: int = 200,
) -> type[RuleBasedStateMachine]:
    """A state machine over the policies that ``make_policy`` makes.

    Args:
        goes_before: whether the first leaf must be evicted before the second; none in the index may precede `next_leaf`.
        max_examples: random runs.

    Raises:
        TypeError: ``make_policy`` cannot be called, or is an abstract class.
        ValueError: ``max_examples`` is not a whole number of at least 1.
    """
    check_maker("make_policy", make_policy, "no arguments")
    check_count("max_examples", max_examples, 1)

    class PolicyMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.policy = make_policy()
            self.leaves: list[FakeLeaf] = []
            self.clock = 0
            if isinstance(self.policy, ClockedPolicy):
                self.policy.use_clock(lambda: self.clock)
            self.on_remove = handlers([self.policy], "on_remove") if isinstance(self.policy, LearningPolicy) else ()

        @rule(
            age=st.integers(0, 5),
            num_blocks=st.integers(1, 9),
            uses=st.integers(1, 70),
            siblings=st.integers(0, 70),
            depth=st.integers(0, 9),
            priority=st.integers(-1, 2),
        )
        def add(self, age: int, num_blocks: int, uses: int, siblings: int, depth: int, priority: int) -> None:
            """Mostly a leaf that was just used; sometimes one whose last use is long ago, as a parent's is."""
            self.clock += 1
            leaf = FakeLeaf(
                max(0, self.clock - age),
                num_blocks,
                uses=uses,
                parent_uses=uses + siblings,
                depth=depth,
                priority=priority,
            )
            if isinstance(self.policy, LearningPolicy):
                self.policy.on_idle(leaf)
            self.policy.add(leaf)
            self.leaves.append(leaf)

        @precondition(lambda self: self.leaves)
        @rule(data=st.data())
        def remove(self, data: st.DataObject) -> None:
            index = data.draw(st.integers(0, len(self.leaves) - 1))
            leaf = self.leaves.pop(index)
            self.policy.remove(leaf)
            if isinstance(self.policy, LearningPolicy):
                self.policy.on_reuse(leaf.group, leaf.num_blocks, leaf.last_use, self.clock, False)

        @precondition(lambda self: self.leaves)
        @rule(data=st.data())
        def split(self, data: st.DataObject) -> None:
            """A sequence uses the first blocks of a leaf, which become its parent; the leaf keeps the others."""
            leaf = data.draw(st.sampled_from(self.leaves))
            if leaf.num_blocks == 1:
                return
            num_used = data.draw(st.integers(1, leaf.num_blocks - 1))
            self.clock += 1
            leaf.num_blocks -= num_used
            leaf.depth += num_used
            leaf.parent_uses = leaf.uses + 1
            if isinstance(self.policy, LearningPolicy):
                self.policy.on_reuse(leaf.group, num_used, leaf.last_use, self.clock, False)

        @precondition(lambda self: self.leaves)
        @rule(data=st.data())
        def use_parent(self, data: st.DataObject) -> None:
            self.clock += 1
            data.draw(st.sampled_from(self.leaves)).parent_uses += 1

        @precondition(lambda self: self.leaves)
        @rule(num_left=st.integers(0, 8))
        def evict(self, num_left: int) -> None:
            """The next leaf gives up blocks: some, then it stays, or all."""
            leaf = self.policy.next_leaf()
            assert isinstance(leaf, FakeLeaf), f"next_leaf: expected a leaf that was added, got {leaf!r:.80}"
            keep = num_left if num_left < leaf.num_blocks else 0
            for notify in self.on_remove:
                notify(leaf, keep, True)
            if keep:
                leaf.num_blocks = keep
            else:
                self.policy.remove(leaf)
                self.leaves.remove(leaf)

        @invariant()
        def the_index_is_what_was_added(self) -> None:
            leaves = list(self.policy.leaves())
            assert Counter(leaves) == Counter(self.leaves), f"leaves: expected {self.leaves}, got {leaves}"
            if not self.leaves:
                return
            following = self.policy.next_leaf()
            assert following in self.leaves, f"{following!r} is next, and not in the index"
            assert self.policy.next_leaf() is following, "next_leaf returns another leaf when called again"
            if goes_before is not None:
                for leaf in self.leaves:
                    assert not goes_before(leaf, following), f"{following!r} is next, although there is {leaf!r}"

    PolicyMachine.TestCase.settings = settings(
        max_examples=max_examples, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return PolicyMachine
