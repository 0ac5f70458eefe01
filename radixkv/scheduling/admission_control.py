"""How many blocks the running sequences must be left, so that letting one more in does not mean preempting it again.

A group that is let in takes blocks for its whole prompt at once; what it and the others will generate is taken as it
comes. If the blocks ran out a moment later, the youngest would be preempted and its prompt computed for nothing, again and
again. So a group is let in only if all who then run can go on until every admitted prompt is computed, and then for as many
steps as that took and a block more, or to their ends where these are nearer::

    steps   | prompts are computed: P | at least P + block_size tokens each |  a preemption comes here at the earliest

It follows that a sequence is preempted at most once every ``block_size`` tokens that it generates, however full the cache,
and that at most half of its steps are lost on prompts computed again. (Someone who lets in by the blocks that are free at
that moment has neither bound; reserving all of ``max_tokens`` has both, and leaves most blocks empty.)

The bounds are for blocks that only sequences take: holds, and samples of one request that part from each other when
nothing else runs, can still exhaust them sooner.
"""

from __future__ import annotations

from collections.abc import Collection

from radixkv.scheduling.request import SequenceGroup


def blocks_to_go_on(groups: Collection[SequenceGroup], block_size: int, max_num_batched_tokens: int) -> int:
    """Blocks, besides those they have, that ``groups`` may take before one of them may be preempted."""
    num_pending = sum(s.num_pending for group in groups if group.num_pending > 1 for s in group.sequences)
    # Decoding sequences go first: what they leave of each step is for the prompts.
    tokens_a_step = max(1, max_num_batched_tokens - sum(group.num_slots for group in groups))
    num_steps = 2 * -(-num_pending // tokens_a_step) + block_size
    return sum(_growth(group, num_steps, block_size) for group in groups)


def _growth(group: SequenceGroup, num_tokens: int, block_size: int) -> int:
    """Blocks that the group takes for ``num_tokens`` more tokens of each sequence, or as many as it may yet generate."""
    sequence = group.sequences[0]
    num_tokens_now = len(sequence.token_ids)
    left = group.request.max_new_tokens - (num_tokens_now - group.request.num_prompt_tokens)
    # The token generated last takes no slot.
    needed = -(-(num_tokens_now + min(num_tokens, left) - 1) // block_size)
    if group.num_slots == 1:
        assert sequence.table is not None
        return max(0, needed - sequence.table.num_blocks)
    # Forks share the whole blocks they have in common; each writes its own copy of the last one.
    return group.num_slots * (needed - (group.num_together or num_tokens_now) // block_size)
