"""The attention plan: which query rows read which run of keys, each shared run once.

A batch is a list of chunks: the new tokens of one sequence each, whose older tokens lie in the blocks of its table.
Sequences that came through the same tree node, or were forked from one another, begin with the same block ids. Sorted
by those ids, the sequences under a node are neighbours, so that every node is one contiguous range of query rows::

    blocks of A   7 8 9 | 20            7 8 9 attended once, by the rows of A, B and C
    blocks of B   7 8 9 | 31 32         31 32 by B
    blocks of C   7 8 9 | 31 40         ...
    blocks of D   50 51                 50 51 by D

The plan names work items, *(query rows, positions of keys)*; a backend attends each and merges, for every query row,
the partial results by their log-sum-exp. (The idea of splitting attention at shared prefixes: Hydragen, Juravsky et
al. 2024, and ChunkAttention, Ye et al. 2024; merging by log-sum-exp: FlashAttention / Flash-Decoding, Dao et al.)
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixkv.attention.cost_model import sharing_pays


# Not frozen: hundreds are made a step, which would take four times as long.
@dataclass(slots=True)
class QueryChunk:
    """The new tokens of one sequence in a batch.

    Attributes:
        block_ids: the sequence's block table, int32; must reach to the last new token.
        num_context: tokens whose keys and values are already in the blocks.
        num_new: tokens to compute now, at positions ``num_context ..``; at least 1.
        owner: the sequence, by which a backend knows it again in the next step; None: it need not.
        version: changes when a block that the sequence had already is replaced by another.
    """

    block_ids: NDArray[np.int32]
    num_context: int
    num_new: int
    owner: Hashable = None
    version: int = 0


@dataclass(frozen=True, slots=True)
class WorkItem:
    """Query rows ``row_start .. row_stop`` attend to the keys at positions ``key_start .. key_stop``.

    ``block_ids`` is the table of (any one of) the rows' sequences, indexed by position // block size. Without
    ``causal`` every row sees every key. With it, the keys are the rows' own new tokens, and a row sees those up to itself.
    """

    row_start: int
    row_stop: int
    key_start: int
    key_stop: int
    block_ids: NDArray[np.int32]
    causal: bool = False

    @property
    def num_rows(self) -> int:
        return self.row_stop - self.row_start

    @property
    def num_keys(self) -> int:
        return self.key_stop - self.key_start


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One batch's work, the same for every layer.

    Attributes:
        order: chunk indices in the order in which their rows stand in the packed batch.
        row_starts: ``[chunks + 1]``: the rows of the chunk ``order[i]`` are ``row_starts[i] .. row_starts[i + 1]``.
        positions: ``[rows]`` position of each row's token in its sequence.
        slots: ``[rows]`` where each row's new key and value go: block id * block size + position in the block.
        items: shared nodes before what lies below them; each row's keys are covered exactly once.
        block_size: tokens a block.
    """

    order: list[int]
    row_starts: list[int]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    items: list[WorkItem]
    block_size: int

    @property
    def num_rows(self) -> int:
        return self.row_starts[-1]

    @property
    def num_keys_read(self) -> int:
        """Keys that a backend reads a layer; compare with the sum of all sequences' lengths to see what sharing saves."""
        return sum(item.num_keys for item in self.items)


def build_plan(chunks: Sequence[QueryChunk], block_size: int) -> AttentionPlan:
    """Lay out one packed batch and find the runs of blocks that its sequences share.

    Raises:
        ValueError: there is no chunk, a chunk has no new token, or its table does not reach to its last token.
    """
    check_chunks(chunks, block_size)
    # Only whole context blocks can be shared: the block that a chunk writes into belongs to it alone.
    shareable = [chunk.block_ids[: chunk.num_context // block_size] for chunk in chunks]
    order = sorted(range(len(chunks)), key=lambda i: shareable[i].astype(">i4").tobytes())
    ordered = [chunks[i] for i in order]
    row_starts = np.concatenate(([0], np.cumsum([chunk.num_new for chunk in ordered]))).tolist()

    positions = np.concatenate([_positions_of(chunk) for chunk in ordered])
    blocks = np.concatenate([c.block_ids[_positions_of(c) // block_size] for c in ordered])
    slots = blocks.astype(np.int64) * block_size + positions % block_size

    items: list[WorkItem] = []
    for node in _shared_nodes([shareable[i] for i in order], block_size):
        rows = row_starts[node.start], row_starts[node.stop]
        owner = ordered[node.start]
        if node.stop - node.start > 1:
            items.append(WorkItem(*rows, node.key_start, node.key_stop, owner.block_ids))
        elif owner.num_new == 1:
            items.append(WorkItem(*rows, node.key_start, owner.num_context + 1, owner.block_ids))
        else:
            if node.key_start < owner.num_context:
                items.append(WorkItem(*rows, node.key_start, owner.num_context, owner.block_ids))
            end = owner.num_context + owner.num_new
            items.append(WorkItem(*rows, owner.num_context, end, owner.block_ids, causal=True))
    return AttentionPlan(order, row_starts, positions, slots, items, block_size)


def check_chunks(chunks: Sequence[QueryChunk], block_size: int) -> None:
    """Refuse a batch that no plan can be made for.

    Raises:
        ValueError: there is no chunk, a chunk has no new token, or its table does not reach to its last token.
    """
    if not chunks:
        raise ValueError("chunks: expected at least one, got none")
    for chunk in chunks:
        num_context, num_new = chunk.num_context, chunk.num_new
        if num_new < 1 or num_context < 0:
            raise ValueError(f"chunks: num_new must be at least 1 and num_context at least 0, got {chunk}")
        if len(chunk.block_ids) * block_size < num_context + num_new:
            raise ValueError(
                f"chunks: {len(chunk.block_ids)} blocks of {block_size} tokens cannot hold {num_context} + {num_new} tokens"
            )


@dataclass(frozen=True, slots=True)
class _Node:
    """Keys ``key_start .. key_stop`` that the sequences ``start .. stop`` read together (one sequence: its own rest)."""

    start: int
    stop: int
    key_start: int
    key_stop: int


def _shared_nodes(tables: Sequence[NDArray[np.int32]], block_size: int) -> Iterator[_Node]:
    """The nodes worth sharing, parents first, and one rest for every sequence; ``tables`` are sorted."""
    common = [common_blocks(a, b) for a, b in itertools.pairwise(tables)]
    pending = [(0, len(tables), 0)]
    while pending:
        start, stop, depth = pending.pop()
        if stop - start == 1:
            yield _Node(start, stop, depth * block_size, len(tables[start]) * block_size)
            continue
        shared = min(common[start : stop - 1])
        parts_at = [i + 1 for i in range(start, stop - 1) if common[i] == shared]
        if sharing_pays(stop - start, (shared - depth) * block_size):
            yield _Node(start, stop, depth * block_size, shared * block_size)
            depth = shared
        borders = [start, *parts_at, stop]
        pending.extend(reversed([(a, b, depth) for a, b in itertools.pairwise(borders)]))


def common_blocks(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many leading blocks two tables have in common."""
    shorter = min(len(a), len(b))
    if not shorter:
        return 0
    differs = a[:shorter] != b[:shorter]
    first = int(differs.argmax())
    return first if differs[first] else shorter


def _positions_of(chunk: QueryChunk) -> NDArray[np.int64]:
    return np.arange(chunk.num_context, chunk.num_context + chunk.num_new)
