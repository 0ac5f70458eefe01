"""Where prompts part inside a block that cannot be split, and the states that are kept there.

The blocks of models with recurrent layers hold the states after their last token (`PrefixCache(splits_blocks=False)`). So
what prompts have in common of the block in which they part would be computed for each of them::

    cached       | block | block | system prompt's end, first question |
    prompt       | block | block | system prompt's end, other question |
                                 ^ reusable           ^ branch point

Instead, a chunk of the first prompt known to part from another ends at the branch point, and the block is kept as it is
there. Nothing is kept of prompts of which no other has as much in common yet. (Marconi, Pan et al. 2025, keeps states at such
points, too.)
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable

from radixkv.cache import PrefixCache
from radixkv.scheduling.batch import ScheduledChunk
from radixkv.scheduling.request import TokenSequence

# Computing so few tokens costs little more than copying a block, and than another step of the sequence that keeps it.
_FEW_TOKENS = 16


class BranchPoints:
    """Chooses and keeps the branch points of sequences whose prompts are in progress (`TokenSequence.branch_points`).

    Attributes:
        num_worthwhile: tokens that must be saved for a branch point. One takes a block, however few tokens are in it.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self.num_worthwhile = max(_FEW_TOKENS, cache.block_size // 8)

    def num_reusable(self, sequence: TokenSequence, num_common: int) -> int:
        """How many of the ``num_common`` tokens with which another prompt begins, too, can be reused once they are computed.

        Whole blocks; or more, if `add` is called for as many.
        """
        num_inside = num_common % self._cache.block_size
        if num_inside < self.num_worthwhile or num_common <= sequence.num_computed:
            return num_common - num_inside
        points = sequence.branch_points
        index = bisect_right(points, num_common)
        before = points[index - 1] if index else 0
        return before if num_common - before < self.num_worthwhile else num_common

    def add(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Keep what is there after the first ``num_tokens``, which `num_reusable` has returned, if that is inside a block.

        It replaces the next branch point if that is near: the first of several serves the most prompts.
        """
        points = sequence.branch_points
        if num_tokens % self._cache.block_size == 0 or num_tokens in points:
            return
        index = bisect_right(points, num_tokens)
        if index < len(points) and points[index] - num_tokens < self.num_worthwhile:
            del points[index]
        insort(points, num_tokens)

    def add_known(self, sequence: TokenSequence) -> None:
        """A sequence has begun: add the branch point at which its prompt leaves the tree."""
        table = sequence.table
        assert table is not None
        if table.publishes and table.num_known_tokens - table.num_tokens >= self.num_worthwhile:
            self.add(sequence, self.num_reusable(sequence, table.num_known_tokens))

    def cut(self, chunks: Iterable[ScheduledChunk]) -> list[ScheduledChunk]:
        """The chunks of a step, up to their sequences' next branch points; the rest is computed in the steps that follow."""
        return [chunk.first(self._num_tokens_to_next(chunk)) for chunk in chunks]

    def keep(self, sequence: TokenSequence) -> None:
        """More of a prompt is computed and published: keep its last block if there is a branch point, and room."""
        points, table = sequence.branch_points, sequence.table
        assert table is not None
        index = bisect_right(points, table.num_tokens)
        if index and points[index - 1] == table.num_tokens and self._cache.num_available_blocks:
            self._cache.branch(table)
        del points[:index]

    @staticmethod
    def _num_tokens_to_next(chunk: ScheduledChunk) -> int:
        sequence = chunk.sequence
        index = bisect_right(sequence.branch_points, sequence.num_computed)
        if index == len(sequence.branch_points):
            return chunk.num_tokens
        return sequence.branch_points[index] - sequence.num_computed
