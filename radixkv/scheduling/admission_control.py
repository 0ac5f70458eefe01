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

from collections.abc import Collection

from radixkv.scheduling.request import SequenceGroup


def decode_growth_blocks(groups: Collection[SequenceGroup], block_size: int, max_num_batched_tokens: int) -> int:
    """Blocks, besides those they have, that ``groups`` may take before one of them may be preempted."""
    num_pending = sum(s.num_pending for group in groups if group.num_pending > 1 for s in group.sequences)
    # Decoding is scheduled first; prompts get the rest of each step.
    prefill_tokens_per_step = max(1, max_num_batched_tokens - sum(group.num_seqs for group in groups))
    num_steps = 2 * -(-num_pending // prefill_tokens_per_step) + block_size
    return sum(_growth(group, num_steps, block_size) for group in groups)


def _growth(group: SequenceGroup, num_tokens: int, block_size: int) -> int:
    """Blocks that the group takes for ``num_tokens`` more tokens per sequence, or as many as it may still generate."""
    sequence = group.sequences[0]
    num_tokens_now = len(sequence.token_ids)
    left = group.request.max_new_tokens - (num_tokens_now - group.request.num_prompt_tokens)
    # The last generated token is never computed and takes no slot.
    needed = -(-(num_tokens_now + min(num_tokens, left) - 1) // block_size)
    if group.num_seqs == 1:
        assert sequence.table is not None
        return max(0, needed - sequence.table.num_blocks)
    # Forks share the full blocks they have in common; each writes its own copy of the last one.
    return group.num_seqs * (needed - (group.num_shared_prefill_tokens or num_tokens_now) // block_size)
