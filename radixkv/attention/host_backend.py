"""What the CPU backends have in common: they plan every batch anew, over one pool in the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from radixkv.attention.backend import AttentionBatch
from radixkv.attention.plan import AttentionPlan, Planner
from radixkv.attention.query_batch import QueryBatch
from radixkv.attention.sharing_rule import SharingRule
from radixkv.cache import BlockCopy
from radixkv.memory import KVPool


class HostBackend:
    """An `AttentionBackend` over one pool, whose tensors must be on the CPU.

    Attributes:
        sharing_cost_tokens: the `SharingRule`'s ``cost_tokens``.
        attention: makes the attention that carries out a plan.
    """

    sharing_cost_tokens: int
    attention: Callable[[AttentionPlan, KVPool], AttentionBatch]

    def __init__(self, pool: KVPool, max_num_seqs: int, max_model_len: int) -> None:
        self._pool = pool
        max_blocks = -(-max_model_len // pool.block_size)
        rule = SharingRule(cost_tokens=self.sharing_cost_tokens)
        self._planner = Planner(max_num_seqs, max_blocks, pool.block_size, rule)

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Carry out the cache's queued copies, in order."""
        self._pool.copy_blocks(copies)

    def prepare(self, batch: QueryBatch) -> AttentionBatch:
        """Attention over one batch, for all layers; see `AttentionBackend.prepare`."""
        return self.attention(self._planner.plan(batch), self._pool)
