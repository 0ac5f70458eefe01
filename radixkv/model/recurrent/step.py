"""The recurrent layers' part of one step: which tokens go on from the states in which blocks, and leave theirs where.

::

    sequence A, 40 new tokens behind 6         blocks of 16 tokens: 7, 9, 2
        tokens  6..15 from block 7 to block 7
        tokens 16..31 from block 7 to block 9      so every block has the states after its last token
        tokens 32..45 from block 9 to block 2
    sequences B, C, D, one new token each
        from blocks 4, 5, 8 to blocks 4, 6, 8      in one call
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.attention import QueryBatch
from radixkv.memory import StatePool
from radixkv.memory.upload import to_device
from radixkv.model.forward_pass import Recur
from radixkv.model.recurrent.layer import Choose, RecurrentCall


@dataclass(frozen=True, slots=True)
class _Segment:
    """New tokens of one sequence in one block: rows ``start .. stop`` of the batch.

    Attributes:
        source: the block whose states they follow; -1: the sequence begins.
        target: the block that they are in.
        num_filled: how many tokens it then has.
    """

    start: int
    stop: int
    source: int
    target: int
    num_filled: int


class RecurrentStep:
    """Calls recurrent layers for the new tokens of a batch.

    Args:
        pool: of their states.
        queries: the batch.
        order: its sequences in the order of the rows.
        row_starts: where each one's rows begin then, and one more.

    Raises:
        RuntimeError: the states in a block are not those that a sequence goes on from.
    """

    def __init__(
        self, pool: StatePool, queries: QueryBatch, order: NDArray[np.int64], row_starts: NDArray[np.int64]
    ) -> None:
        self._states = pool.states
        # One after the other: a sequence's later ones follow the states of those before.
        self._segments: list[_Segment] = []
        single: list[_Segment] = []  # the only new token of a sequence that goes on
        before: list[tuple[int, int]] = []
        contexts, counts = queries.num_context.tolist(), queries.num_new.tolist()
        for index, row in zip(order.tolist(), row_starts.tolist(), strict=False):
            context = contexts[index]
            segments = _segments(queries.tables[index].block_ids, pool.block_size, row, context, counts[index])
            if context:
                before.append((segments[0].source, (context - 1) % pool.block_size + 1))
            if context and counts[index] == 1:
                single += segments
            else:
                self._segments += segments
        device = pool.num_tokens.device
        if before:
            pool.check(*_columns(before, device))
        blocks, filled = _columns([(each.target, each.num_filled) for each in (*self._segments, *single)], device)
        pool.num_tokens[blocks] = filled
        self._rows = None
        if single:
            columns = _columns([(each.start, each.source, each.target) for each in single], device)
            self._rows, self._sources, self._targets = columns

    def recur(self, call: RecurrentCall) -> torch.Tensor:
        """What a layer gives for all rows, ``[1, rows, dim]``."""
        states = self._states[call.layer.index]
        if not self._segments:
            return self._run_single(call, states, _as_sequences)
        parts = [self._run_segment(call, states, segment) for segment in self._segments]
        output = parts[0].new_empty(1, call.num_tokens, parts[0].shape[-1])
        for segment, part in zip(self._segments, parts, strict=True):
            output[:, segment.start : segment.stop] = part
        if self._rows is not None:
            rows = self._rows
            output[:, rows] = self._run_single(call, states, lambda value: value[0, rows].unsqueeze(1))
        return output

    @staticmethod
    def _run_segment(call: RecurrentCall, states: Sequence[torch.Tensor], segment: _Segment) -> torch.Tensor:
        if segment.source not in (-1, segment.target):
            for state in states:
                state[segment.target] = state[segment.source]
        own = [state[segment.target : segment.target + 1] for state in states]
        return call.run(lambda value: value[:, segment.start : segment.stop], own, begun=segment.source >= 0)

    def _run_single(self, call: RecurrentCall, states: Sequence[torch.Tensor], choose: Choose) -> torch.Tensor:
        """For the sequences with one new token, in one call; ``[1, sequences, dim]``."""
        own = [state.index_select(0, self._sources) for state in states]
        output = call.run(choose, own, begun=True)
        for state, new in zip(states, own, strict=True):
            state.index_copy_(0, self._targets, new)
        return output.transpose(0, 1)


def _segments(
    block_ids: NDArray[np.int32], block_size: int, row: int, num_context: int, num_new: int
) -> list[_Segment]:
    """The new tokens of a sequence, from row ``row`` of the batch on, block by block."""
    segments = []
    position, end = num_context, num_context + num_new
    source = int(block_ids[(position - 1) // block_size]) if position else -1
    while position < end:
        target = int(block_ids[position // block_size])
        stop = min(end, position + block_size - position % block_size)
        segments.append(_Segment(row, row + stop - position, source, target, (stop - 1) % block_size + 1))
        row, position, source = row + stop - position, stop, target
    return segments


def _columns(rows: Sequence[tuple[int, ...]], device: torch.device) -> tuple[torch.Tensor, ...]:
    """The columns of a table, int64, on a device."""
    return to_device(torch.tensor(rows, dtype=torch.int64).T.contiguous(), device).unbind(0)


def _as_sequences(value: torch.Tensor) -> torch.Tensor:
    """``[tokens, 1, ...]`` of ``[1, tokens, ...]``."""
    return value.transpose(0, 1)


def recur_alone(call: RecurrentCall) -> torch.Tensor:
    """Each token as a sequence of its own, to find out whether anything else mixes tokens."""
    return call.run(_as_sequences, None, begun=False).transpose(0, 1)


def recur_in_one(call: RecurrentCall) -> torch.Tensor:
    """All tokens as one sequence."""
    return call.run(lambda value: value, None, begun=False)


def recur_from(states: Sequence[list[torch.Tensor]], begun: bool) -> Recur:
    """All tokens as one sequence, whose states are kept.

    Args:
        states: by layer, ``[1, *dims]`` each; changed in place.
        begun: whether the sequence goes on from them.
    """
    return lambda call: call.run(lambda value: value, states[call.layer.index], begun)
