"""Making a table's whole blocks known: the tree takes them over, or shows the table those that it has already."""

from __future__ import annotations

from radixkv.cache.block_pool import BlockPool
from radixkv.cache.block_table import BlockTable
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.stats import CacheStats
from radixkv.cache.tokens import TOKEN_BYTES


class Publisher:
    """Publishes the blocks of one cache's tables.

    Args:
        tree: where blocks become known.
        pool: where those go back that the tree had already.
        block_size: tokens a block.
        stats: where these are counted.
    """

    def __init__(self, tree: RadixTree, pool: BlockPool, block_size: int, stats: CacheStats) -> None:
        self._tree = tree
        self._pool = pool
        self._block_size = block_size
        self._stats = stats

    def publish(self, table: BlockTable) -> None:
        """Make known all whole blocks of a table that are not yet."""
        start, stop = table._num_published, table._num_tokens // self._block_size
        # What was known once is apart from what is new, and by how often it was used: they have different prospects.
        for past_stop, past_uses in table._past:
            if start < past_stop and start < stop:
                self._publish_blocks(table, start, min(stop, past_stop), past_uses)
                start = table._num_published
        if start < stop:
            self._publish_blocks(table, start, stop)

    def _publish_blocks(self, table: BlockTable, start: int, stop: int, past_uses: int = 0) -> None:
        assert table._node is not None
        own = table._ids[start:stop]
        num_bytes = (stop - start) * self._block_size * TOKEN_BYTES
        tokens, table._tail = table._tail, table._tail[num_bytes:]
        del tokens[num_bytes:]
        table._node, kept = self._tree.publish(table._node, tokens, own, past_uses)
        table._num_published = stop
        if kept is own:
            return
        known = own[kept != own]
        table._ids[start:stop] = kept
        table.version += 1
        self._pool.release(known)
        self._stats.deduplicated_blocks += len(known)
