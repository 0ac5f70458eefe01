"""Groups that wait for a prefix that a running group is computing right now, so that it is computed once.

Sixteen equal prompts that arrive together cost one: the first is computed, the others wait until what they share with it is
published, chunk by chunk, and are admitted then. The wait ends when the prefix is published, or when it will not be, or not
soon: because its owner no longer runs, or the cache was cleared under it, or other prompts are computed before the owner's.
In this last case, groups whose prompts do not fit into the tokens left in the step still wait: they could not start either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from radixkv.cache import PrefixCache
from radixkv.scheduling.branch_points import BranchPoints
from radixkv.scheduling.request import SequenceGroup


@dataclass(frozen=True, slots=True)
class InFlightPrefix:
    """The first ``num_tokens`` of a waiting group's prompt, which ``owner`` is computing."""

    owner: SequenceGroup
    num_tokens: int


class InFlightPrefixes:
    """Which group waits for which running group's prefix.

    Owners are found by the block that they publish next, so a group looks only at those that compute its own prompt, however
    many run. Once a group waits for another, a wait costs one comparison of two numbers per step.

    Args:
        branch_points: where owners keep what others share with them inside a block; None: blocks can be split.
    """

    def __init__(self, cache: PrefixCache, branch_points: BranchPoints | None = None) -> None:
        self._cache = cache
        self._branch_points = branch_points
        # Tokens that a group and an owner must have in common beyond what is cached.
        self._least = cache.block_size
        if branch_points is not None:
            self._least = min(cache.block_size, branch_points.num_worthwhile)
        self._prefixes: dict[SequenceGroup, InFlightPrefix] = {}
        # The owners that got no tokens in this step, and in the one before, and how many were left for shorter prompts.
        self._stalled: dict[SequenceGroup, int] = {}
        self._stalled_before: dict[SequenceGroup, int] = {}
        self._num_cached: dict[SequenceGroup, int] = {}  # tokens of the prompts of stalled owners, once asked for
        self._owners: set[SequenceGroup] = set()  # the groups that run
        # Those whose prompts are in progress, by the block that they publish next: its namespace, its start, its tokens (the
        # first of them, where it may be kept before it is whole).
        self._by_block: dict[str, dict[int, dict[bytes, list[SequenceGroup]]]] = {}

    def begin_step(self, running: Iterable[SequenceGroup]) -> None:
        """Forget which owners got no tokens in the step before, and look at what runs."""
        self._stalled_before, self._stalled = self._stalled, {}
        self.look_at(running)

    def look_at(self, running: Iterable[SequenceGroup]) -> None:
        """These groups run now."""
        self._owners.clear()
        self._by_block.clear()
        self._num_cached.clear()
        for group in running:
            self.add(group)

    def add(self, owner: SequenceGroup) -> None:
        """A group runs, or is about to."""
        self._owners.add(owner)
        if owner.num_pending <= 1:
            return  # no group begins to wait for it; one that waits already goes on, as its last block may not be published
        namespace, start = owner.request.namespace, owner.sequences[0].num_computed
        block = owner.prefill_token_ids[start : start + self._least].tobytes()
        self._by_block.setdefault(namespace, {}).setdefault(start, {}).setdefault(block, []).append(owner)

    def remove(self, owner: SequenceGroup) -> None:
        """A group will run no longer."""
        self._owners.discard(owner)

    def note_stalled(self, owner: SequenceGroup, num_tokens_left: int) -> None:
        """A running group whose prompt is in progress gets no tokens in this step; so many are left for shorter prompts."""
        self._stalled[owner] = num_tokens_left

    def forget(self, group: SequenceGroup) -> None:
        """``group`` no longer waits."""
        self._prefixes.pop(group, None)

    def is_in_flight(self, prefix: InFlightPrefix) -> bool:
        """Whether it will be published soon."""
        return prefix.num_tokens > self.num_not_awaited(prefix.owner)

    def num_not_awaited(self, owner: SequenceGroup) -> float:
        """The longest prefix of a group's prompt that is not in flight: as it is published, or will not be, or not soon."""
        if owner not in self._owners or not _publishes(owner):
            return math.inf
        return max(owner.sequences[0].num_computed, self._num_startable(owner))

    def awaited_by(self, group: SequenceGroup) -> InFlightPrefix | None:
        """What a group waited for when it was asked last whether it should wait; None: it need not."""
        return self._prefixes.get(group)

    def may_wait_out_of_turn(self, group: SequenceGroup) -> bool:
        """Whether a group that should wait does so even if its owner gets no tokens again, as in the step before.

        Then no step has to look at it until its wait is over.
        """
        prefix = self._prefixes[group]
        num_left = self._stalled_before.get(prefix.owner, 0)
        return prefix.num_tokens > prefix.owner.sequences[0].num_computed + num_left

    def should_wait(self, group: SequenceGroup, through_stalls: bool) -> bool:
        """Whether a group that runs will soon publish more of this one's prompt than is cached now, by a block or so.

        Args:
            through_stalls: also for owners that got no tokens in this step or the one before.
        """
        prefix = self._prefixes.get(group)
        if prefix is not None:
            if self.is_in_flight(prefix) and (through_stalls or not self._is_stalled(prefix.owner)):
                return True
            del self._prefixes[group]
        request = group.request
        if not request.reuses_prefixes or len(group.sequences) > 1:
            return False
        # The last token of a prompt is always computed, for its logits.
        longest = len(group.prefill_token_ids) - 1
        for start, owners in self._by_block.get(request.namespace, {}).items():
            for owner in owners.get(group.prefill_token_ids[start : start + self._least].tobytes(), ()):
                # A less urgent owner may be preempted, or get no tokens, for the sake of others.
                if owner not in self._owners or owner.request.priority > request.priority or not _publishes(owner):
                    continue
                if not through_stalls and self._is_stalled(owner):
                    continue
                num_common = self._num_reusable(owner, min(_num_common_tokens(group, owner), longest))
                if num_common <= self._num_startable(owner):
                    continue
                # What the owner has computed of it is cached, too: its table holds it.
                if num_common - self._cache.match(group.prefill_token_ids, request.namespace) >= self._least:
                    self._prefixes[group] = InFlightPrefix(owner, num_common)
                    if self._branch_points is not None:
                        self._branch_points.add(owner.sequences[0], num_common)
                    return True
        return False

    def _num_reusable(self, owner: SequenceGroup, num_common: int) -> int:
        """How many of an owner's first tokens another prompt can reuse that has ``num_common`` of them in common."""
        if self._branch_points is not None:
            return self._branch_points.num_reusable(owner.sequences[0], num_common)
        return num_common - num_common % self._cache.block_size

    def _num_startable(self, owner: SequenceGroup) -> int:
        """The longest prefix of a stalled owner's prompt that another group could compute in this step; 0 if not stalled."""
        num_left = self._stalled.get(owner)
        if num_left is None:
            return 0
        if owner not in self._num_cached:  # another group may have computed more of it than the owner
            self._num_cached[owner] = self._cache.match(owner.prefill_token_ids, owner.request.namespace)
        return self._num_cached[owner] + num_left

    def _is_stalled(self, owner: SequenceGroup) -> bool:
        return owner in self._stalled or owner in self._stalled_before


def _publishes(owner: SequenceGroup) -> bool:
    """Whether what a group computes, which runs or is about to start, is published."""
    table = owner.sequences[0].table
    return owner.request.write_cache and (table is None or table.node is not None)


def _num_common_tokens(a: SequenceGroup, b: SequenceGroup) -> int:
    size = min(len(a.prefill_token_ids), len(b.prefill_token_ids))
    differs = a.prefill_token_ids[:size] != b.prefill_token_ids[:size]
    return int(differs.argmax()) if differs.any() else size
