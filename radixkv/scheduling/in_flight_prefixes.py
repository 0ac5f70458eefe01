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
class _InFlightPrefix:
    """The first ``num_tokens`` of a waiting group's prompt, which ``owner`` is computing."""

    owner: SequenceGroup
    num_tokens: int


class InFlightPrefixes:
    """Which group waits for which running group's prefix.

    The prompts of two groups are compared once; after that, a wait costs one comparison of two numbers per step.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._prefixes: dict[SequenceGroup, _InFlightPrefix] = {}
        self._stalled: set[SequenceGroup] = set()

    def begin_step(self) -> None:
        """Forget which owners got no tokens in the step before."""
        self._stalled.clear()

    def note_stalled(self, owner: SequenceGroup) -> None:
        """A running group whose prompt is in progress gets no tokens in this step; nobody waits for it."""
        self._stalled.add(owner)

    def forget(self, group: SequenceGroup) -> None:
        """``group`` no longer waits."""
        self._prefixes.pop(group, None)

    def should_wait(self, group: SequenceGroup, running: dict[SequenceGroup, None]) -> bool:
        """Whether one of ``running`` will soon publish at least a block more of the group's prompt than is cached now."""
        prefix = self._prefixes.get(group)
        if prefix is not None and prefix.owner not in self._stalled:
            owner = prefix.owner
            if owner in running and _publishes(owner) and owner.sequences[0].num_computed < prefix.num_tokens:
                return True
            del self._prefixes[group]
        request = group.request
        if not request.reuses_prefixes or len(group.sequences) > 1:
            return False
        size = self._cache.block_size
        # The last token of a prompt is always computed, for its logits.
        longest = len(group.prompt) - 1
        blocks: dict[int, bytes] = {}
        for owner in self._owners(group, running):
            num_computed = owner.sequences[0].num_computed
            # A quick test that rules out most owners: the next block that they publish differs from the group's prompt.
            block = slice(num_computed, num_computed + size)
            if block.stop > longest:
                continue
            if num_computed not in blocks:
                blocks[num_computed] = group.prompt[block].tobytes()
            if owner.prompt[block].tobytes() != blocks[num_computed]:
                continue
            num_common = min(_num_common_tokens(group, owner), longest) // size * size
            if num_common - num_computed >= size and (
                num_common - self._cache.match(group.prompt, request.namespace) >= size
            ):
                self._prefixes[group] = _InFlightPrefix(owner, num_common)
                return True
        return False

    def _owners(self, group: SequenceGroup, running: Iterable[SequenceGroup]) -> Iterable[SequenceGroup]:
        """Groups that are being prefilled and whose prefixes ``group`` may share, without priority inversion."""
        request = group.request
        return (
            owner
            for owner in running
            if owner.num_pending > 1
            and owner not in self._stalled
            and _publishes(owner)
            and owner.request.namespace == request.namespace
            and owner.request.priority <= request.priority
        )


def _publishes(owner: SequenceGroup) -> bool:
    """Whether what a group computes, which runs or is about to start, is published."""
    table = owner.sequences[0].table
    return owner.request.write_cache and (table is None or table.node is not None)


def _num_common_tokens(a: SequenceGroup, b: SequenceGroup) -> int:
    size = min(len(a.prompt), len(b.prompt))
    differs = a.prompt[:size] != b.prompt[:size]
    return int(differs.argmax()) if differs.any() else size
