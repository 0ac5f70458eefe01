"""Sequences that join, fork, grow and leave, with block tables that share as a cache's do."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st
from support.attention_batches import Chunk, Table

from radixkv.attention.batch_tables import common_blocks


class ForkingSequences:
    """Block tables that share as a cache's do: forks of one another, and every last block its sequence's own."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.owners = itertools.count()
        first = next(self.owners)
        self.blocks: dict[int, list[int]] = {first: [self.fresh()]}
        self.tables: dict[int, Table] = {first: Table([])}

    def fresh(self) -> int:
        # Small and large numbers by turns, so that order by value and order in time differ.
        number = next(self.numbers)
        return number if number % 2 else 5000 - number

    def change(self, kind: str, which: int, length: int) -> None:
        owner = list(self.blocks)[which % len(self.blocks)]
        blocks = self.blocks[owner]
        if kind == "join":
            new = next(self.owners)
            # No more than whole blocks: the last one belongs to its sequence alone.
            self.blocks[new] = [*blocks[: length % len(blocks)], self.fresh()]
            self.tables[new] = Table([])
        elif kind == "grow":
            blocks.extend(self.fresh() for _ in range(length % 4))
        elif kind == "replace":
            blocks[-1] = self.fresh()
            self.tables[owner].version += 1
        elif len(self.blocks) > 1:
            del self.blocks[owner]

    def chunks(self, reverse: bool) -> list[Chunk]:
        chunks = []
        for owner, blocks in sorted(self.blocks.items(), reverse=reverse):
            self.tables[owner].block_ids = np.array(blocks, dtype=np.int32)
            chunks.append(Chunk(self.tables[owner], 16 * len(blocks) - 1, 1))
        return chunks

    def best_sharing(self) -> int:
        """The blocks that neighbours have in common in an order in which they have the most."""
        return sum(common_blocks(*map(np.array, pair)) for pair in itertools.pairwise(sorted(self.blocks.values())))


# Changes of a batch, arguments of `ForkingSequences.change`, and whether its chunks are given in reverse.
steps = st.lists(
    st.tuples(
        st.lists(
            st.tuples(st.sampled_from(["join", "leave", "grow", "replace"]), st.integers(0, 99), st.integers(0, 99)),
            max_size=6,
        ),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)
Steps = list[tuple[list[tuple[str, int, int]], bool]]
