"""Groups that wait for a prefix that a running group is computing right now, so that it is computed once.

Sixteen equal prompts that arrive together cost one: the first is computed, the others wait until what they share with it is
published, chunk by chunk, and are admitted then. The wait ends when the prefix is published, or when it will not be, or not
soon: because its owner no longer runs, or the cache was cleared under it, or the owner's own prompt waits for other prompts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from radixkv.cache import PrefixCache
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
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._prefixes: dict[SequenceGroup, InFlightPrefix] = {}
        self._stalled: set[SequenceGroup] = set()
        self._stalled_before: set[SequenceGroup] = set()  # in the step before
        self._owners: set[SequenceGroup] = set()  # the groups that run
        # Those whose prompts are in progress, by the block that they publish next: its namespace, its start, its tokens.
        self._by_block: dict[str, dict[int, dict[bytes, list[SequenceGroup]]]] = {}

    def begin_step(self, running: Iterable[SequenceGroup]) -> None:
        """Forget which owners got no tokens in the step before, and look at what runs."""
        self._stalled_before, self._stalled = self._stalled, set()
        self.look_at(running)

    def look_at(self, running: Iterable[SequenceGroup]) -> None:
        """These groups run now."""
        self._owners.clear()
        self._by_block.clear()
        for group in running:
            if group not in self._stalled:
                self.add(group)

    def add(self, owner: SequenceGroup) -> None:
        """A group runs, or is about to."""
        self._owners.add(owner)
        if owner.num_pending <= 1:
            return  # no group begins to wait for it; one that waits already goes on, as its last block may not be published
        namespace, start = owner.request.namespace, owner.sequences[0].num_computed
        block = owner.prefill_token_ids[start : start + self._cache.block_size].tobytes()
        self._by_block.setdefault(namespace, {}).setdefault(start, {}).setdefault(block, []).append(owner)

    def remove(self, owner: SequenceGroup) -> None:
        """A group will run no longer."""
        self._owners.discard(owner)

    def note_stalled(self, owner: SequenceGroup) -> None:
        """A running group whose prompt is in progress gets no tokens in this step; nobody waits for it."""
        self._stalled.add(owner)
        self.remove(owner)

    def forget(self, group: SequenceGroup) -> None:
        """``group`` no longer waits."""
        self._prefixes.pop(group, None)

    def is_in_flight(self, prefix: InFlightPrefix) -> bool:
        """Whether it will be published soon."""
        owner = prefix.owner
        return owner in self._owners and _publishes(owner) and owner.sequences[0].num_computed < prefix.num_tokens

    def awaited_by(self, group: SequenceGroup) -> InFlightPrefix | None:
        """What a group waited for when it was asked last whether it should wait; None: it need not."""
        return self._prefixes.get(group)

    def is_seen(self, group: SequenceGroup) -> bool:
        """Whether the wait of a group that should wait may last, so that nobody has to look at it until it is over."""
        return self._prefixes[group].owner not in self._stalled_before

    def should_wait(self, group: SequenceGroup) -> bool:
        """Whether a group that runs will soon publish at least a block more of this one's prompt than is cached now."""
        prefix = self._prefixes.get(group)
        if prefix is not None:
            if self.is_in_flight(prefix):
                return True
            del self._prefixes[group]
        request = group.request
        if not request.reuses_prefixes or len(group.sequences) > 1:
            return False
        size = self._cache.block_size
        # The last token of a prompt is always computed, for its logits.
        longest = len(group.prefill_token_ids) - 1
        for start, owners in self._by_block.get(request.namespace, {}).items():
            for owner in owners.get(group.prefill_token_ids[start : start + size].tobytes(), ()):
                # A less urgent owner may be preempted, or get no tokens, for the sake of others.
                if owner not in self._owners or owner.request.priority > request.priority or not _publishes(owner):
                    continue
                num_common = min(_num_common_tokens(group, owner), longest) // size * size
                # What the owner has computed of it is cached, too: its table holds it.
                if num_common - self._cache.match(group.prefill_token_ids, request.namespace) >= size:
                    self._prefixes[group] = InFlightPrefix(owner, num_common)
                    return True
        return False


def _publishes(owner: SequenceGroup) -> bool:
    """Whether what a group computes, which runs or is about to start, is published."""
    table = owner.sequences[0].table
    return owner.request.write_cache and (table is None or table.node is not None)


def _num_common_tokens(a: SequenceGroup, b: SequenceGroup) -> int:
    size = min(len(a.prefill_token_ids), len(b.prefill_token_ids))
    differs = a.prefill_token_ids[:size] != b.prefill_token_ids[:size]
    return int(differs.argmax()) if differs.any() else size
