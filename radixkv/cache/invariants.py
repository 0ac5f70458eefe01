"""Every rule that the cache keeps, verified from scratch."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection

import numpy as np

from radixkv.cache.block_pool import BlockPool
from radixkv.cache.block_store import BlockStore
from radixkv.cache.block_table import BlockTable
from radixkv.cache.errors import InvariantViolation
from radixkv.cache.node import Node
from radixkv.cache.pin import Pins
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.tokens import TOKEN_BYTES


def check_cache(store: BlockStore, tables: Collection[BlockTable]) -> None:
    """Raise InvariantViolation, naming the first rule that a cache's blocks and its live tables do not keep."""
    tree, stats = store.tree, store.stats
    store.pool.check()
    nodes = list(tree.nodes())
    _check_shape(tree, nodes, store.block_size)
    _check_owners(store.pool, nodes, tables)
    _check_locks(tree, nodes, tables, store.pins)
    for table in tables:
        table.check()
    _check_eviction(tree, nodes)
    pending = sum(table.num_unaccounted_tokens for table in tables)
    accounted = stats.reused_tokens + stats.computed_tokens + stats.abandoned_tokens + pending
    if stats.queried_tokens != accounted:
        raise InvariantViolation(f"{stats.queried_tokens} tokens queried, {accounted} accounted for")


def _check_shape(tree: RadixTree, nodes: list[Node], block_size: int) -> None:
    for namespace, root in tree.roots.items():
        if root.namespace != namespace or root.parent is not None or root.tokens or root.blocks:
            raise InvariantViolation(f"root of {namespace!r} is not a root of that name")
        if not root.children and not root.lock_count:
            raise InvariantViolation(f"root of {namespace!r} is unused and still there")
    for node in nodes:
        if -(-node.num_tokens // block_size) != node.num_blocks or (node.parent is not None and not node.tokens):
            raise InvariantViolation(f"a node of {node.num_tokens} tokens has {node.num_blocks} blocks")
        if node.num_tokens % block_size and (node.children or node.lock_count):
            raise InvariantViolation("a node with a partly filled block is locked or has children")
        if node.children is not None and not node.children:
            raise InvariantViolation("a leaf keeps an empty index of children")
        keys = list(node.children) if node.children else []
        for key, following in itertools.pairwise(keys):
            if tree.splits_blocks and following.startswith(key):
                raise InvariantViolation("a child's first tokens continue those of its sibling")
        for key in keys:
            child = node.children[key]  # type: ignore[index]
            if child.parent is not node or bytes(child.tokens[: block_size * TOKEN_BYTES]) != key:
                raise InvariantViolation("a child is filed under a key that is not its own, or has another parent")


def _check_owners(pool: BlockPool, nodes: list[Node], tables: Collection[BlockTable]) -> None:
    """The tree owns its blocks once, tables the others; a table owns the tree's by a lock (`_check_locks`)."""
    owners = np.zeros(pool.num_blocks, dtype=np.int64)
    for holder in (*(table.own_block_ids for table in tables), *(node.block_ids() for node in nodes)):
        if len(np.unique(holder)) != len(holder):
            raise InvariantViolation("a table or node holds a block twice")
        owners[holder] += 1
    in_tree = np.concatenate([np.empty(0, dtype=np.int32), *(node.block_ids() for node in nodes)])
    if (owners[in_tree] != 1).any():
        raise InvariantViolation("a block of the tree is in it twice, or counted as a table's own too")
    wrong = np.flatnonzero(owners != pool.ref_counts)
    if len(wrong):
        block = int(wrong[0])
        raise InvariantViolation(f"block {block} counts {pool.ref_counts[block]} owners and has {owners[block]}")


def _check_locks(tree: RadixTree, nodes: list[Node], tables: Collection[BlockTable], pins: Pins) -> None:
    locks: Counter[int] = Counter()
    for end in (*(table.node for table in tables), *pins.nodes()):
        if end is not None:
            if list(end.path())[-1] not in tree.roots.values():
                raise InvariantViolation("a table or pin ends in a node that is no longer in the tree")
            locks.update(id(node) for node in end.path())
    pinned = Counter(id(node) for end in pins.nodes() for node in end.path())
    for node in nodes:
        if node.lock_count != locks[id(node)]:
            raise InvariantViolation(f"a node counts {node.lock_count} locks and has {locks[id(node)]}")
        if node.num_pins != pinned[id(node)]:
            raise InvariantViolation(f"a node counts {node.num_pins} pins and has {pinned[id(node)]}")
    num_pinned = sum(node.num_blocks for node in nodes if node.num_pins)
    if pins.num_blocks != num_pinned:
        raise InvariantViolation(f"{pins.num_blocks} blocks count as pinned, {num_pinned} are")


def _check_eviction(tree: RadixTree, nodes: list[Node]) -> None:
    """What may be evicted is exactly what is not locked."""
    unlocked = [node for node in nodes if node.lock_count == 0]
    if tree.num_evictable_blocks != sum(node.num_blocks for node in unlocked):
        raise InvariantViolation(f"{tree.num_evictable_blocks} blocks count as evictable, others are")
    # Every sequence that has used a node has used its parents, too, and has ended.
    if any(node.parent is not None and node.parent.priority < node.priority for node in unlocked):
        raise InvariantViolation("an idle node has a higher priority than its parent")
    leaves = {node for node in unlocked if not node.children and node.parent is not None}
    if tree.leaves is not (tree.owner_limits or tree.policy):
        raise InvariantViolation("leaves are not indexed where they should be")
    if set(tree.policy.leaves()) != leaves:
        raise InvariantViolation("the eviction index is not the leaves that may be evicted")
    if tree.owner_limits is not None:
        tree.owner_limits.check(nodes)
