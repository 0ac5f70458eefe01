"""Requests that wait for a prefix which a running one is just computing, so that it is computed once.

Sixteen equal prompts that arrive together cost one: the first computes, the others wait until what they share with it is
published, step by step as its chunks are computed, and are let in then. The wait ends when the prefix is there, or when
its owner no longer runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from radixkv.cache import PrefixCache
from radixkv.scheduling.request import SequenceGroup


@dataclass(frozen=True, slots=True)
class _AwaitedPrefix:
    """The first ``num_tokens`` of the waiting group's prompt, once ``owner`` has computed them."""

    owner: SequenceGroup
    num_tokens: int


class AwaitedPrefixes:
    """Who waits for whose prefix.

    The prompts of two groups are compared once; while the waiting goes on, a step costs one comparison of two numbers.

    Args:
        cache: where the prefix will be published.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._awaited: dict[SequenceGroup, _AwaitedPrefix] = {}

    def forget(self, group: SequenceGroup) -> None:
        """``group`` waits no more."""
        self._awaited.pop(group, None)

    def is_worth_waiting(self, group: SequenceGroup, running: dict[SequenceGroup, None]) -> bool:
        """Whether one of ``running`` will soon publish at least a block more of the group's prompt than is known now."""
        awaited = self._awaited.get(group)
        if awaited is not None:
            owner = awaited.owner
            if owner in running and owner.sequences[0].num_computed < awaited.num_tokens:
                return True
            del self._awaited[group]
        request = group.request
        if not request.read_cache or len(group.sequences) > 1:
            return False
        size = self._cache.block_size
        for owner in self._owners(group, running):
            # One token less than the whole prompt: the last is always computed, for its logits.
            num_common = min(_num_common_tokens(group, owner), len(group.prompt) - 1) // size * size
            num_computed = owner.sequences[0].num_computed
            if num_common - num_computed >= size and (
                num_common - self._cache.match(group.prompt, request.namespace) >= size
            ):
                self._awaited[group] = _AwaitedPrefix(owner, num_common)
                return True
        return False

    @staticmethod
    def _owners(group: SequenceGroup, running: Iterable[SequenceGroup]) -> Iterable[SequenceGroup]:
        """Those whose prompts are in progress and whose prefixes ``group`` may use; none that would be computed later."""
        request = group.request
        return (
            owner
            for owner in running
            if owner.num_pending > 1
            and owner.request.write_cache
            and owner.request.namespace == request.namespace
            and owner.request.priority <= request.priority
        )


def _num_common_tokens(a: SequenceGroup, b: SequenceGroup) -> int:
    size = min(len(a.prompt), len(b.prompt))
    differs = a.prompt[:size] != b.prompt[:size]
    return int(differs.argmax()) if differs.any() else size
