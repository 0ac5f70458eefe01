"""Token prefixes -> runs of blocks: one tree a namespace, with compressed edges.

::

    root ── "You are a helpful assistant." ──┬── " What is ..."   a leaf; its last block may be partly filled
            16 blocks, locked by 3 tables    └── " Who was ..."

An edge's tokens lie in one growing byte array, so a comparison is one memory comparison however long the edge. Children
are found by their first block's bytes, in a dictionary that hashes and then compares them; the same keys, sorted, give
the neighbour with the longest common prefix when a prompt parts from the tree inside a block. Nodes begin and end at
block borders; only a leaf may end with a partly filled block, and only while nobody has it locked.

(RadixAttention: SGLang, Zheng et al. 2024.)
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

import numpy as np

from radixkv.cache.block_hash import namespace_hash
from radixkv.cache.block_pool import BlockIds, BlockPool
from radixkv.cache.children import Children
from radixkv.cache.events import BlocksRemoved, BlocksStored, EventLog
from radixkv.cache.evicted import EvictedBlocks, EvictedPrefixes
from radixkv.cache.eviction import EvictionPolicy, LearningPolicy
from radixkv.cache.node import Match, Node, Root
from radixkv.cache.tokens import TOKEN_BYTES, common_tokens, decode


class RadixTree:
    """The trees of all namespaces over one pool.

    A table owns the blocks of the tree that it uses by a lock on their nodes, not by a count on each block: opening,
    forking and closing a sequence cost as much as its path has nodes, however many blocks these hold.

    Args:
        pool: where the blocks' references are counted.
        block_size: tokens a block.
        policy: which leaf goes first.
        now: the cache's clock, in seconds.
        evicted: where evicted prefixes are remembered, if they are.
        events: where changes are told, if they are.

    Attributes:
        version: another number whenever `match` may answer otherwise than before.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        policy: EvictionPolicy,
        now: Callable[[], float],
        evicted: EvictedPrefixes | None,
        events: EventLog | None,
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self.policy = policy
        self.evicted = evicted
        self.events = events
        self._learner = policy if isinstance(policy, LearningPolicy) else None
        self._now = now
        self.roots: dict[str, Root] = {}
        self.num_blocks = 0
        self.num_evictable_blocks = 0
        self.version = 0

    def nodes(self) -> Iterator[Node]:
        """Every node of every namespace, roots included, parents first."""
        pending: list[Node] = list(self.roots.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values() if node.children is not None else ())

    # -- looking up ----------------------------------------------------------------------------------------------

    def match(self, prompt: bytes, namespace: str) -> Match | None:
        """The longest known prefix of an encoded prompt; None where the namespace is empty."""
        node: Node | None = self.roots.get(namespace)
        if node is None:
            return None
        size, offset = self._block_bytes, 0
        while node.children is not None:
            child = node.children.by_key.get(prompt[offset : offset + size])
            if child is None:
                return self._match_in_first_block(node, prompt, offset)
            if not prompt.startswith(child.tokens, offset):
                return self._match_inside(child, prompt, offset)
            node = child
            offset += len(child.tokens)
        whole, partial = divmod(node.num_tokens, self._block_size)
        return Match(offset // TOKEN_BYTES, node, whole, partial, node.blocks[-1] if partial else -1)

    def _match_in_first_block(self, node: Node, prompt: bytes, offset: int) -> Match:
        """No child begins with the prompt's next block: the nearest of them in order shares the most of it."""
        assert node.children is not None
        key = prompt[offset : offset + self._block_bytes]
        best, longest = b"", 0
        for neighbour in (node.children.before(key), node.children.at_or_after(key)):
            if neighbour is not None and (common := common_tokens(key, 0, neighbour)) > longest:
                best, longest = neighbour, common
        known = offset // TOKEN_BYTES
        if not longest:
            return Match(known, node, node.num_blocks)
        nearest = node.children[best]
        return Match(known + longest, nearest, 0, longest, nearest.blocks[0])

    def _match_inside(self, node: Node, prompt: bytes, offset: int) -> Match:
        common = common_tokens(prompt, offset, node.tokens)
        whole, partial = divmod(common, self._block_size)
        block = node.blocks[whole] if partial else -1
        return Match(offset // TOKEN_BYTES + common, node, whole, partial, block)

    def path_blocks(self, match: Match) -> BlockIds:
        """The whole blocks of a matched prefix, from the first on."""
        last, *before = match.node.path()
        return np.concatenate(
            [*(node.block_ids() for node in reversed(before)), last.block_ids(0, match.num_node_blocks)]
        )

    def hashes(self, node: Node) -> array[int]:
        """The hash of each of the node's blocks; a root has the one that its namespace begins with."""
        return node.block_hashes(self._block_bytes)

    def hash_before(self, match: Match) -> int:
        """The hash of the last whole block of a match, or of its namespace."""
        node, place = match.node, match.num_node_blocks
        while not place and node.parent is not None:
            node = node.parent
            place = len(node.blocks)
        return self.hashes(node)[max(0, place - 1)]

    # -- locks ---------------------------------------------------------------------------------------------------

    def lock(self, match: Match) -> Node:
        """Keep a match's whole blocks from eviction; returns the node that now ends with them, to be unlocked later."""
        node = match.node
        if match.num_node_blocks == 0 and node.parent is not None:
            node = node.parent
        elif match.num_node_blocks * self._block_bytes < len(node.tokens):
            node = self._split(node, match.num_node_blocks)
        now = self._now()
        for step in node.path():
            self._lock_node(step, now)
            step.last_use = now
            step.uses += 1
        return node

    def lock_again(self, node: Node, count: int) -> None:
        """``count`` more locks on a locked node, for forks."""
        for step in node.path():
            step.lock_count += count

    def unlock(self, node: Node, priority: int = 0) -> None:
        now = self._now()
        for step in node.path():
            step.last_use = now
            step.lock_count -= 1
            if step.priority < priority:
                step.priority = priority
            if step.lock_count == 0:
                self.num_evictable_blocks += len(step.blocks)
                if self._learner is not None and step.parent is not None:
                    self._learner.wait_begins(step)
                self._let_go_if_leaf(step)

    def _lock_node(self, node: Node, now: float) -> None:
        if node.lock_count == 0:
            self.num_evictable_blocks -= len(node.blocks)
            if node.parent is not None:
                if node.children is None:
                    self.policy.remove(node)
                if self._learner is not None:
                    self._learner.wait_ends(node.group, len(node.blocks), node.last_use, now)
        node.lock_count += 1

    def recall(self, match: Match, prompt: bytes) -> list[tuple[int, int]]:
        """What continues a match and was evicted: ``(place, uses)``, ascending; now forgotten.

        The prompt's whole blocks before ``place`` and after the one before had been used so often. Only where the match
        ends with a node's last block: elsewhere something else took their place.
        """
        assert self.evicted is not None
        if match.num_partial_tokens or match.num_node_blocks < match.node.num_blocks or not len(self.evicted):
            return []
        past: list[tuple[int, int]] = []
        place, now = match.num_tokens // self._block_size, self._now()
        for record, num_tokens in self.evicted.take(
            self.hashes(match.node)[-1], prompt, match.num_tokens * TOKEN_BYTES
        ):
            place += num_tokens // self._block_size
            if past and past[-1][1] == record.uses:
                past.pop()
            past.append((place, record.uses))
            if self._learner is not None:
                self._learner.wait_ends(record.group, -(-num_tokens // self._block_size), record.last_use, now)
        return past

    def _let_go_if_leaf(self, node: Node) -> None:
        """A node without locks and children may be evicted; a root like that is of no use."""
        if node.lock_count or node.children is not None:
            return
        if isinstance(node, Root):
            del self.roots[node.namespace]
        else:
            self.policy.add(node)

    # -- growing -------------------------------------------------------------------------------------------------

    def root(self, namespace: str) -> Node:
        """The namespace's root, made if there is none."""
        node = self.roots.get(namespace)
        if node is None:
            node = self.roots[namespace] = Root(namespace)
        return node

    def publish(self, node: Node, tokens: bytearray, blocks: BlockIds, past_uses: int = 0) -> tuple[Node, BlockIds]:
        """Add whole blocks below ``node``, which the caller has locked; the lock moves down with them.

        The caller's ownership of the blocks becomes the tree's, but for those whose tokens the tree already holds: there
        its own blocks stay, and the caller's remain the caller's.

        Args:
            tokens: the blocks' token ids, encoded. The tree's from now on: a long prompt is not copied once more.
            blocks: the caller's block ids.
            past_uses: how often they were used before they were evicted (`recall`).

        Returns:
            The node that now ends with the last block, locked in ``node``'s place, and the tree's ids for the blocks.
        """
        self.version += 1
        size, place, kept = self._block_bytes, 0, blocks
        while place < len(blocks):
            offset = place * size
            key = bytes(tokens[offset : offset + size])
            child = node.children.by_key.get(key) if node.children is not None else None
            if child is None:
                self._drop_partial_prefix(node, key)
                extended = self._extend(node, tokens[offset:] if offset else tokens, blocks[place:], past_uses)
                return extended, kept
            common = common_tokens(tokens, offset, child.tokens) // self._block_size
            if common * size < len(child.tokens):
                child = self._split(child, common)
            self._lock_node(child, self._now())
            if kept is blocks:
                kept = blocks.copy()
            kept[place : place + common] = child.block_ids()
            node = child
            place += common
        return node, kept

    def publish_partial(self, node: Node, tokens: bytearray, block: int, priority: int = 0) -> bool:
        """Add a partly filled block below ``node``, which the caller has locked and is about to unlock.

        The caller's ownership of the block and of ``tokens`` becomes the tree's. Returns False, and takes nothing, where
        the tree holds these tokens already.
        """
        if node.children is not None:
            following = node.children.at_or_after(tokens)
            if following is not None and following.startswith(tokens):
                return False
            self._drop_partial_prefix(node, tokens)
        self.version += 1
        blocks = np.array([block], dtype=np.int32)
        if self._grows_in_place(node):
            self._extend(node, tokens, blocks)
        else:
            child = self._add_child(node, tokens, blocks)
            child.last_use = self._now()
            child.priority = priority
            self.num_evictable_blocks += 1
            if self._learner is not None:
                self._learner.wait_begins(child)
            self.policy.add(child)
        return True

    def _extend(self, node: Node, tokens: bytearray, blocks: BlockIds, past_uses: int = 0) -> Node:
        """New blocks below a locked node: a leaf that only the caller uses grows in place, so a long chat is one node."""
        if not self._grows_in_place(node, past_uses):
            child = self._add_child(node, tokens, blocks)
            child.lock_count = 1
            child.uses += past_uses
            return child
        node.tokens += tokens
        node.blocks.frombytes(blocks.tobytes())
        self.num_blocks += len(blocks)
        if self.events is not None:
            self._tell_stored(node, len(node.blocks) - len(blocks))
        return node

    def _grows_in_place(self, node: Node, past_uses: int = 0) -> bool:
        if node.children is not None or node.lock_count != 1 or node.parent is None:
            return False
        # A policy that learns is told apart what was used again and what only follows it: these differ in their prospects.
        return self._learner is None or node.uses == 1 + past_uses

    def _add_child(self, node: Node, tokens: bytearray, blocks: BlockIds) -> Node:
        child = Node(node, tokens, array("i", blocks.tobytes()), node.last_use)
        if node.children is None:
            node.children = Children()
        node.children[bytes(tokens[: self._block_bytes])] = child
        self.num_blocks += len(blocks)
        if self.events is not None:
            self._tell_stored(child, 0)
        return child

    def _drop_partial_prefix(self, node: Node, key: bytes | bytearray) -> None:
        """Let go of the partly filled leaf whose tokens ``key`` continues: the fuller block takes its place."""
        if node.children is None:
            return
        before = node.children.before(key)
        if before is not None and key.startswith(before):
            leaf = node.children[before]
            self._remove_leaf(leaf)
            self._pool.release(leaf.block_ids())

    def _split(self, node: Node, num_blocks: int) -> Node:
        """Cut an edge after ``num_blocks``; returns the new upper part. The lower stays the node that others have locked."""
        assert node.parent is not None and node.parent.children is not None
        size = num_blocks * self._block_bytes
        upper = Node(node.parent, node.tokens[:size], node.blocks[:num_blocks], node.last_use)
        upper.lock_count = node.lock_count
        upper.uses, upper.priority, upper.group = node.uses, node.priority, node.group
        if node.hashes is not None:
            upper.hashes, node.hashes = node.hashes[:num_blocks], node.hashes[num_blocks:]
        node.parent.children[bytes(node.tokens[: self._block_bytes])] = upper
        del node.tokens[:size]
        del node.blocks[:num_blocks]
        upper.children = Children()
        upper.children[bytes(node.tokens[: self._block_bytes])] = node
        node.parent = upper
        node.depth += num_blocks
        return upper

    # -- shrinking -----------------------------------------------------------------------------------------------

    def evict(self, count: int) -> tuple[int, int]:
        """Free ``count`` blocks, which must be evictable: leaves before their parents, a leaf from its tail.

        Returns:
            Tokens and blocks evicted.
        """
        self.version += 1
        num_tokens, missing = 0, count
        now = self._now()
        freed = array("i")  # released together: the pool then joins neighbours once
        while missing:
            leaf = self.policy.next_leaf()
            assert isinstance(leaf, Node)
            keep = max(0, len(leaf.blocks) - missing)
            if self.evicted is not None:
                self._remember(leaf, keep, now)
            if not keep:
                missing -= len(leaf.blocks)
                num_tokens += leaf.num_tokens
                freed += leaf.blocks
                self._remove_leaf(leaf)
                continue
            num_tokens += leaf.num_tokens - keep * self._block_size
            freed += leaf.blocks[keep:]
            if self.events is not None:
                self._tell_removed(leaf, keep)
            del leaf.blocks[keep:]
            del leaf.tokens[keep * self._block_bytes :]
            if leaf.hashes is not None:
                del leaf.hashes[keep:]
            self.num_blocks -= missing
            self.num_evictable_blocks -= missing
            missing = 0
        self._pool.release(np.frombuffer(freed, dtype=np.int32))
        return num_tokens, count

    def _remember(self, leaf: Node, keep: int, now: float) -> None:
        """Make a record of the blocks after the first ``keep``, which are about to be evicted."""
        assert self.evicted is not None
        hashes = self.hashes(leaf)
        self.evicted.add(
            EvictedBlocks(
                leaf.namespace,
                hashes[keep:] if keep else hashes,
                len(leaf.tokens) // TOKEN_BYTES - keep * self._block_size,
                leaf.last_use,
                leaf.uses,
                leaf.group,
                now,
            )
        )

    def _remove_leaf(self, leaf: Node) -> None:
        """Take an unlocked leaf out; its blocks are the caller's to release."""
        parent = leaf.parent
        assert parent is not None and parent.children is not None
        self.policy.remove(leaf)
        if self.events is not None:
            self._tell_removed(leaf, 0)
        self.num_blocks -= len(leaf.blocks)
        self.num_evictable_blocks -= len(leaf.blocks)
        del parent.children[bytes(leaf.tokens[: self._block_bytes])]
        if not parent.children:
            parent.children = None
        self._let_go_if_leaf(parent)

    def remove_namespace(self, namespace: str, tell: bool) -> None:
        """Forget all of a namespace, locked nodes too: who holds their blocks must no longer publish there."""
        self.version += 1
        pending: list[Node] = [self.roots.pop(namespace)]
        while pending:
            node = pending.pop()
            if node.children is not None:
                pending.extend(node.children.values())
            elif node.lock_count == 0 and node.parent is not None:
                self.policy.remove(node)
            if tell and self.events is not None and node.blocks:
                self._tell_removed(node, 0)
            if node.lock_count == 0:
                self.num_evictable_blocks -= node.num_blocks
            self.num_blocks -= node.num_blocks
            self._pool.release(node.block_ids())

    # -- telling -------------------------------------------------------------------------------------------------

    def _tell_stored(self, node: Node, start: int) -> None:
        assert self.events is not None and node.parent is not None
        hashes = self.hashes(node)
        above = node if start else node.parent
        self.events.add(
            BlocksStored(
                tuple(hashes[start:]),
                (hashes[start - 1] if start else self.hashes(above)[-1]) if above.parent is not None else None,
                tuple(decode(node.tokens[start * self._block_bytes :]).tolist()),
                self._block_size,
                namespace_hash(node.namespace),
                self.events.medium,
            )
        )

    def _tell_removed(self, node: Node, start: int) -> None:
        assert self.events is not None
        name = namespace_hash(node.namespace)
        self.events.add(BlocksRemoved(tuple(self.hashes(node)[start:]), name, self.events.medium))
