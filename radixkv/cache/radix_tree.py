"""Token prefixes -> runs of blocks: one tree per namespace, with compressed edges.

::

    root ── "You are a helpful assistant." ──┬── " What is ..."   a leaf; its last block may be partly filled
            16 blocks, locked by 3 tables    └── " Who was ..."

An edge's tokens lie in one growing byte array, so a comparison is one memory comparison however long the edge. Children
are found by their first block's bytes, in a dictionary that hashes and then compares them; the same keys, sorted, give
the neighbour with the longest common prefix when a prompt leaves the tree inside a block. Nodes begin and end at block
boundaries; only a leaf may end with a partly filled block, and only while it is not locked. Where blocks can be split, no
partly filled block is there beside a fuller one that begins with its tokens.

(RadixAttention: SGLang, Zheng et al. 2024.)
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from radixkv.cache.block_pool import BlockIds, BlockPool
from radixkv.cache.eviction import EvictionPolicy, LearningPolicy
from radixkv.cache.match import Match, match_in_first_block, match_inside
from radixkv.cache.node import Node, Root
from radixkv.cache.observer import Observers, TreeObserver
from radixkv.cache.owner_limits import OwnerLimits
from radixkv.cache.tokens import TOKEN_BYTES, common_tokens


class RadixTree:
    """The trees of all namespaces over one pool.

    A table owns the tree's blocks that it uses through a lock on their nodes, not a count per block: the cost of opening,
    forking and closing a sequence grows with the nodes on its path, however many blocks these hold.

    Args:
        pool: where the blocks' references are counted.
        policy: which leaf is evicted first.
        clock: the cache's, in seconds.
        observers: are notified of changes, in this order, a policy that learns before them.

    Attributes:
        policy: which leaf is evicted first where no owner is beyond its limit.
        owner_limits: in front of the policy, where owners have limits.
        splits_blocks: whether the first tokens of a block may be reused without the rest.
        leaves: the index of evictable leaves: the limits where there are any, or the policy.
        observers: those that are notified of changes.
        roots: the root of each namespace that has something cached or in use.
        num_evictable_blocks: blocks of the nodes that are not locked.
        version: changes whenever `match` may answer otherwise than before.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        observers: Sequence[TreeObserver],
        splits_blocks: bool = True,
    ) -> None:
        self._pool = pool
        self.splits_blocks = splits_blocks
        self._block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self.policy = policy
        self.owner_limits: OwnerLimits | None = None
        self.leaves: EvictionPolicy = policy
        self._clock = clock
        self.observers = Observers(policy if isinstance(policy, LearningPolicy) else None, observers)
        self.roots: dict[str, Root] = {}
        self.num_evictable_blocks = 0
        self.version = 0

    def __getstate__(self) -> tuple[dict[str, Any], list[Node], list[int]]:
        """Attributes, then the nodes, and the index of each one's parent: a tree may be deeper than Python's stack."""
        nodes = list(self.nodes())
        index_of = {node: index for index, node in enumerate(nodes)}
        return vars(self), nodes, [-1 if node.parent is None else index_of[node.parent] for node in nodes]

    def __setstate__(self, state: tuple[dict[str, Any], list[Node], list[int]]) -> None:
        attributes, nodes, parents = state
        vars(self).update(attributes)
        for node, parent in zip(nodes, parents, strict=True):
            if parent >= 0:
                nodes[parent].link(node)

    def nodes(self) -> Iterator[Node]:
        """Every node of every namespace, roots included, parents first."""
        pending: list[Node] = list(self.roots.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values() if node.children is not None else ())

    def limit_owners(self, limits: Mapping[str, int]) -> None:
        """See `PrefixCache.limit_owners`."""
        # First, since a policy of the caller's own may raise.
        owner_limits = OwnerLimits(limits, self.policy, self.nodes()) if limits else None
        if self.owner_limits is not None:
            self.observers.remove(self.owner_limits)
        if owner_limits is not None:
            self.observers.add(owner_limits)
        self.owner_limits, self.leaves = owner_limits, owner_limits or self.policy

    # -- look-up -------------------------------------------------------------------------------------------------

    def match(self, prompt: bytes, namespace: str) -> Match | None:
        """The longest cached prefix of an encoded prompt that can be reused; None where the namespace is empty."""
        return self.reusable(self.longest_prefix(prompt, namespace))

    def reusable(self, longest: Match | None) -> Match | None:
        """How much of a longest cached prefix can be reused."""
        return longest if longest is None or self.splits_blocks else longest.at_block_end()

    def longest_prefix(self, prompt: bytes, namespace: str) -> Match | None:
        """The longest cached prefix of an encoded prompt, wherever in a block it ends; None where the namespace is empty."""
        node: Node | None = self.roots.get(namespace)
        if node is None:
            return None
        size, offset = self._block_bytes, 0
        while node.children is not None:
            child = node.children.by_key.get(prompt[offset : offset + size])
            if child is None:
                return match_in_first_block(node, prompt, offset)
            if not prompt.startswith(child.tokens, offset):
                return match_inside(child, prompt, offset)
            node = child
            offset += len(child.tokens)
        whole, partial = divmod(node.num_tokens, self._block_size)
        return Match(offset // TOKEN_BYTES, node, whole, partial, node.blocks[-1] if partial else -1)

    # -- locks ---------------------------------------------------------------------------------------------------

    def lock(self, match: Match) -> Node:
        """Keep a match's whole blocks from eviction; returns the node that now ends with them, to be unlocked later."""
        node = match.node
        if match.num_node_blocks == 0 and node.parent is not None:
            node = node.parent
        elif match.num_node_blocks * self._block_bytes < len(node.tokens):
            node = self._split(node, match.num_node_blocks)
        now = self._clock()
        step: Node | None = node
        while step is not None:
            if step.lock_count == 0:
                self._to_in_use(step, now)
            step.lock_count += 1
            step.last_use = now
            step.uses += 1
            step = step.parent
        return node

    def lock_again(self, node: Node, count: int) -> None:
        """``count`` more locks on a locked node, for forks."""
        for step in node.path():
            step.lock_count += count

    def unlock(self, node: Node, priority: int | None = None) -> None:
        """One lock fewer; nodes without any become evictable.

        Args:
            priority: retention priority of the sequence that ends, which is a use: every node on the path keeps the highest.
                None: a pin ends, which is none.
        """
        now = self._clock()
        step: Node | None = node
        while step is not None:
            step.lock_count -= 1
            if priority is not None:
                step.last_use = now
                if step.priority < priority:
                    step.priority = priority
            if step.lock_count == 0:
                self._to_idle(step)
            step = step.parent

    def _to_in_use(self, node: Node, now: float) -> None:
        """``node``, which is not locked yet, can no longer be evicted."""
        self.num_evictable_blocks -= len(node.blocks)
        if node.parent is not None:
            if node.children is None:
                self.leaves.remove(node)
            for notify in self.observers.on_reuse:
                notify(node.group, len(node.blocks), node.last_use, now, False)

    def _to_idle(self, node: Node) -> None:
        """``node``, whose last lock is gone, can be evicted once it is a leaf; an unused root is removed."""
        if node.parent is None:
            if node.children is None:
                del self.roots[node.namespace]
            return
        self.num_evictable_blocks += len(node.blocks)
        for notify in self.observers.on_idle:
            notify(node)
        if node.children is None:
            self.leaves.add(node)

    # -- insertion -----------------------------------------------------------------------------------------------

    def root(self, namespace: str) -> Node:
        """The namespace's root, made if there is none."""
        node = self.roots.get(namespace)
        if node is None:
            node = self.roots[namespace] = Root(namespace, self._block_bytes)
        return node

    def publish(
        self, node: Node, tokens: bytearray, blocks: BlockIds, priority: int, past_uses: int, owner: str
    ) -> tuple[Node, BlockIds]:
        """Add whole blocks below ``node``, which the caller has locked; the lock moves down with them.

        The caller's ownership of the blocks passes to the tree, except for blocks whose tokens the tree already holds:
        there the tree keeps its own blocks, and the caller keeps its.

        Args:
            tokens: the blocks' token ids, encoded. They belong to the tree from now on, to spare a copy of a long prompt.
            priority: retention priority of a new node.
            past_uses: how often they were used before they were evicted (`EvictedPrefixes.recall`).

        Returns:
            The node that now ends with the last block, locked in place of ``node``, and the tree's ids for the blocks:
            ``blocks`` itself where the tree held none of them.
        """
        self.version += 1
        size, start, kept = self._block_bytes, 0, blocks
        while start < len(blocks):
            offset = start * size
            key = bytes(tokens[offset : offset + size])
            child = node.children.by_key.get(key) if node.children is not None else None
            if child is None:
                self._drop_partial_prefix(node, key)
                rest = tokens[offset:] if offset else tokens
                return self._extend(node, rest, blocks[start:], priority, past_uses, owner), kept
            common = common_tokens(tokens, offset, child.tokens) // self._block_size
            if common * size < len(child.tokens):
                child = self._split(child, common)
            if child.lock_count == 0:
                self._to_in_use(child, self._clock())
            child.lock_count += 1
            if kept is blocks:
                kept = blocks.copy()
            kept[start : start + common] = child.block_ids()
            node = child
            start += common
        return node, kept

    def publish_partial(
        self, node: Node, tokens: bytearray, block: int, priority: int, owner: str, is_branch_point: bool
    ) -> bool:
        """Add a partly filled block below ``node``, which the caller has locked and is about to unlock.

        The caller's ownership of the block and of ``tokens`` passes to the tree. Returns False, and takes neither, where the
        tree already holds these tokens: there its own block has been used once more.

        Args:
            is_branch_point: it stays where fuller blocks continue it; others of the caller's locks on ``node`` remain.
        """
        if node.children is not None:
            following = node.children.at_or_after(tokens)
            holds_it = following is not None and (
                following.startswith(tokens) if self.splits_blocks else following == tokens
            )
            if following is not None and holds_it:
                child = node.children[following]
                child.is_branch_point |= is_branch_point
                self.use_first_block(child, priority)
                return False
            self._drop_partial_prefix(node, tokens)
        self.version += 1
        last = self._extend(node, tokens, np.array([block], dtype=np.int32), priority, 0, owner)
        last.is_branch_point = is_branch_point
        if last is not node:  # a partly filled block cannot be locked
            last.lock_count = 0
            last.last_use = self._clock()
            self._to_idle(last)
        return True

    def use_first_block(self, child: Node, priority: int) -> None:
        """Count a use of the first block of a node, whose parent is locked."""
        if len(child.blocks) > 1:
            return  # it says nothing about the blocks that follow, and tails are evicted first anyway
        now, is_idle = self._clock(), child.lock_count == 0
        if is_idle:
            self._to_in_use(child, now)
        child.last_use = now
        child.priority = max(child.priority, priority)
        if child.uses < child.parent_uses:  # forks end as several sequences, and began as one
            child.uses += 1
        if is_idle:
            self._to_idle(child)

    def _extend(
        self, node: Node, tokens: bytearray, blocks: BlockIds, priority: int, past_uses: int, owner: str
    ) -> Node:
        """New blocks below a locked node: in the node, where a chat goes on, or in a child that is locked in its place."""
        is_own = node.children is None and node.lock_count == 1 and node.parent is not None and node.owner == owner
        # Below blocks of a higher priority, they would be kept for as long as these. And for a learning policy, blocks that
        # were reused and new ones that follow them are separate nodes: their chances of reuse differ.
        is_alike = node.priority <= priority and (not self.observers.on_reuse or node.uses == 1 + past_uses)
        if is_own and is_alike:
            start = len(node.blocks)
            node.tokens += tokens
            node.blocks.frombytes(blocks.tobytes())
        else:
            parent, start = node, 0
            node = Node(parent, tokens, array("i", blocks.tobytes()), parent.last_use)
            node.uses, node.priority, node.owner, node.lock_count = 1 + past_uses, priority, owner, 1
            parent.link(node)
        for notify in self.observers.on_insert:
            notify(node, start)
        return node

    def _drop_partial_prefix(self, node: Node, key: bytes | bytearray) -> None:
        """Remove the partly filled leaf that ``key`` continues, unless prompts part there: fuller blocks replace it."""
        if node.children is None:
            return
        before = node.children.longest_prefix_of(key)
        if before is not None and not (leaf := node.children[before]).is_branch_point:
            for notify in self.observers.on_remove:
                notify(leaf, 0, False)
            self._remove_leaf(leaf)
            self._pool.release(leaf.block_ids())

    def _split(self, node: Node, num_blocks: int) -> Node:
        upper = node.split(num_blocks)
        for notify in self.observers.on_split:
            notify(upper, node)
        return upper

    # -- removal -------------------------------------------------------------------------------------------------

    def evict(self, count: int) -> int:
        """Free ``count`` blocks, which must be evictable: leaves before their parents, a leaf from its tail.

        Returns:
            How many tokens were in them.
        """
        self.version += 1
        num_tokens = 0
        freed = array("i")  # released together: the pool then joins neighbours once
        while missing := count - len(freed):
            leaf = self.leaves.next_leaf()
            assert isinstance(leaf, Node), f"next_leaf: expected a leaf that was added, got {leaf!r:.80}"
            most = missing if self.owner_limits is None else self.owner_limits.num_to_evict(leaf, missing)
            keep = max(0, len(leaf.blocks) - most)
            for notify in self.observers.on_remove:
                notify(leaf, keep, True)
            num_tokens += leaf.num_tokens - keep * self._block_size
            freed += leaf.blocks[keep:]
            if keep:
                leaf.truncate(keep)
                self.num_evictable_blocks -= most
            else:
                self._remove_leaf(leaf)
        self._pool.release(np.frombuffer(freed, dtype=np.int32))
        return num_tokens

    def _remove_leaf(self, leaf: Node) -> None:
        """Unlink an unlocked leaf; its blocks are the caller's to release."""
        parent = leaf.parent
        assert parent is not None and parent.children is not None
        self.leaves.remove(leaf)
        self.num_evictable_blocks -= len(leaf.blocks)
        del parent.children[bytes(leaf.tokens[: self._block_bytes])]
        if not parent.children:
            parent.children = None
            if parent.lock_count == 0:
                if parent.parent is None:
                    del self.roots[parent.namespace]
                else:
                    self.leaves.add(parent)

    def clear(self, namespace: str | None) -> None:
        """Remove a whole namespace, or all for None, locked nodes included: these must not be unlocked afterwards."""
        self.version += 1
        names = list(self.roots) if namespace is None else [namespace] if namespace in self.roots else []
        removed: list[Node] = [self.roots.pop(name) for name in names]
        for node in removed:
            if node.children is not None:
                removed.extend(node.children.values())
            elif node.lock_count == 0 and node.parent is not None:
                self.leaves.remove(node)
            if node.lock_count == 0:
                self.num_evictable_blocks -= node.num_blocks
            self._pool.release(node.block_ids())
        for notify in self.observers.on_clear:
            notify(namespace, removed)
