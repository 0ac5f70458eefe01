"""How many blocks each owner may keep cached while blocks are needed: its blocks beyond that are evicted first.

An owner is the party for whom a sequence ran (`PrefixCache.open(owner=...)`); a block of the tree belongs to the owner that
computed it, whichever owner reuses it. Nothing is evicted before blocks are needed, so owners may use what no other needs::

    limits   bulk 100           bulk has 160, all idle; 20 blocks are needed:  bulk's, least recently used first
                                bulk has 110, all idle; 20 blocks are needed:  10 of bulk's, 10 that the policy chooses
                                bulk has 160, in use:                          all that the policy chooses
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from radixkv.cache.errors import InvariantViolation
from radixkv.cache.eviction import LRU, EvictableLeaf, EvictionPolicy
from radixkv.cache.node import Node
from radixkv.cache.observer import TreeObserver


class OwnerLimits(TreeObserver):
    """An eviction policy in front of another: as long as an owner is beyond its limit, that owner's leaves are evicted.

    Of several such owners, the one furthest beyond its limit: chosen for each leaf that gives up blocks, not for each block.

    Args:
        limits: blocks by owner; others have no limit.
        policy: the cache's, which chooses where no owner is beyond its limit. It stays the index of all leaves.
    """

    def __init__(self, limits: Mapping[str, int], policy: EvictionPolicy, nodes: Iterable[Node]) -> None:
        self._policy = policy
        self._limits = dict(limits)
        self._num_blocks: Counter[str] = Counter()
        self._beyond: dict[str, int] = {}  # by how many blocks
        self._leaves = {owner: LRU() for owner in limits}
        for node in nodes:
            self._count(node.owner, node.num_blocks)
        for leaf in sorted(policy.leaves(), key=lambda leaf: leaf.last_use):
            self._index(leaf, add=True)

    # -- the policy ----------------------------------------------------------------------------------------------

    def add(self, leaf: EvictableLeaf) -> None:
        self._policy.add(leaf)
        self._index(leaf, add=True)

    def remove(self, leaf: EvictableLeaf) -> None:
        self._policy.remove(leaf)
        self._index(leaf, add=False)

    def next_leaf(self) -> EvictableLeaf:
        owners = [owner for owner in self._beyond if self._leaves[owner]]
        if not owners:
            return self._policy.next_leaf()
        return self._leaves[max(owners, key=self._beyond.__getitem__)].next_leaf()

    def leaves(self) -> Collection[EvictableLeaf]:
        return self._policy.leaves()

    def num_to_evict(self, leaf: Node, missing: int) -> int:
        """How many of ``missing`` blocks `next_leaf` should give up: no more than its owner has beyond a limit."""
        return min(missing, self._beyond.get(leaf.owner, missing))

    # -- the observer --------------------------------------------------------------------------------------------

    def on_insert(self, node: Node, start: int) -> None:
        self._count(node.owner, len(node.blocks) - start)

    def on_remove(self, node: Node, start: int, evicted: bool) -> None:
        self._count(node.owner, start - len(node.blocks))

    def on_clear(self, namespace: str | None, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self._count(node.owner, -node.num_blocks)

    def check(self, nodes: Iterable[Node]) -> None:
        """Raise InvariantViolation unless counts and indexes agree with these nodes, all of the tree."""
        counted: Counter[str] = Counter()
        for node in nodes:
            counted[node.owner] += node.num_blocks
        for owner, limit in self._limits.items():
            if self._num_blocks[owner] != counted[owner]:
                raise InvariantViolation(f"{owner!r} counts {self._num_blocks[owner]} blocks and has {counted[owner]}")
            if self._beyond.get(owner, 0) != max(0, counted[owner] - limit):
                raise InvariantViolation(f"{owner!r} has {counted[owner]} blocks of {limit}, which was not noticed")
            own = {leaf for leaf in self._policy.leaves() if _owner(leaf) == owner}
            if set(self._leaves[owner].leaves()) != own:
                raise InvariantViolation(f"the eviction index of {owner!r} is not its leaves")

    # -- internals -----------------------------------------------------------------------------------------------

    def _count(self, owner: str, change: int) -> None:
        limit = self._limits.get(owner)
        if limit is None:
            return
        self._num_blocks[owner] += change
        beyond = self._num_blocks[owner] - limit
        if beyond > 0:
            self._beyond[owner] = beyond
        else:
            self._beyond.pop(owner, None)

    def _index(self, leaf: EvictableLeaf, add: bool) -> None:
        leaves = self._leaves.get(_owner(leaf))
        if leaves is not None:
            (leaves.add if add else leaves.remove)(leaf)


def _owner(leaf: EvictableLeaf) -> str:
    assert isinstance(leaf, Node)
    return leaf.owner
