"""Admission control: how many blocks must stay available for decode growth when one more group is admitted.

An admitted group takes blocks for its whole prompt at once; blocks for generated tokens are taken as decoding needs them. If
blocks ran out a moment later, the youngest group would be preempted and its prompt computed in vain, again and again. So a
group is admitted only if all groups that then run can continue until every admitted prompt is computed, and then for as many
steps as that took and one block more, or to their ends if these are nearer::

    steps   | prefill of admitted prompts: P | at least P + block_size tokens each |  earliest preemption

It follows that a sequence is preempted at most once per ``block_size`` tokens that it generates, however full the cache,
and that at most half of its steps are lost on prompts computed again. (Admission by the blocks that are free at the moment
has neither bound; reserving all of ``max_tokens`` has both, and leaves most blocks empty.)

The bounds hold for blocks that only sequences take: pins, and samples of one request that diverge when nothing else runs,
can still exhaust them sooner.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from radixkv.scheduling.request import SequenceGroup


class DecodeGrowth:
    """How many more blocks groups may take before one of them may be preempted.

    Groups are added one by one as they are admitted; between two steps they change, and the sum is begun anew.
    """

    def __init__(self, groups: Iterable[SequenceGroup], block_size: int, max_num_batched_tokens: int) -> None:
        self._block_size = block_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._num_pending = 0
        # Four numbers for each group: tokens of its first sequence, tokens that it may still generate, blocks that each of
        # its sequences has for itself or in common, and concurrent sequences. An array, because numpy copies it at once.
        self._numbers = array("q")
        self.num_seqs = 0
        for group in groups:
            self.add(group)

    def add(self, group: SequenceGroup, num_cached: int = 0) -> None:
        """Count a group that runs from now on, or is about to.

        Args:
            group: with its tables, or with one sequence that has none yet.
            num_cached: tokens that such a sequence will find cached.
        """
        request, sequence, num_seqs = group.request, group.sequences[0], group.num_seqs
        num_tokens = len(sequence.token_ids)
        if num_seqs == 1:
            table = sequence.table
            num_blocks = -(-num_tokens // self._block_size) if table is None else table.num_blocks
        else:
            # Forks share the full blocks they have in common; each writes its own copy of the last one.
            num_blocks = (group.num_shared_prefill_tokens or num_tokens) // self._block_size
        left = request.max_new_tokens - (num_tokens - request.num_prompt_tokens)
        self._numbers.extend((num_tokens, left, num_blocks, num_seqs))
        self.num_seqs += num_seqs
        if group.num_pending - num_cached > 1:
            self._num_pending += sum(sequence.num_pending for sequence in group.sequences) - num_cached

    @property
    def num_blocks(self) -> int:
        """Blocks that the groups added so far may still take."""
        # Decoding is scheduled first; prompts get the rest of each step.
        prefill_tokens_per_step = max(1, self._max_num_batched_tokens - self.num_seqs)
        num_steps = 2 * -(-self._num_pending // prefill_tokens_per_step) + self._block_size
        num_tokens, left, num_blocks, num_seqs = np.array(self._numbers).reshape(-1, 4).T
        # The last generated token is never computed and takes no slot.
        needed = -(-(num_tokens + np.minimum(num_steps, left) - 1) // self._block_size)
        return int((num_seqs * np.maximum(needed - num_blocks, 0)).sum())
