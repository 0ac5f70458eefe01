"""The states of recurrent layers that the cache's block ids stand for, beside keys and values.

A recurrent layer (Mamba, a gated delta net, a short convolution) keeps of a sequence no keys and values of each token, but a
state of fixed size that every token changes. A block holds, besides the keys and values of its tokens, the states after the
last of them::

    block 7, whole           block 3, 10 of 16 tokens
    keys and values 0..15    keys and values 16..25
    states after token 15    states after token 25      the next token changes them in place

So a sequence can go on behind a whole block, and behind a partly filled one that nobody has filled any further, and nowhere
else: that is what `PrefixCache(splits_blocks=False)` reuses. Sharing, copy-on-write, forks and eviction are those of the
blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from radixkv.cache import BlockCopy


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor that a recurrent layer keeps of a sequence."""

    dims: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's."""
        return math.prod(self.dims) * self.dtype.itemsize


class StatePool:
    """The states after the last token of each of ``num_blocks`` physical blocks, for every recurrent layer.

    Args:
        layers: by layer, the shapes of its states; the same tensors for every sequence.
        num_blocks: as of the pool of keys and values.
        block_size: tokens per block.
        device: where the tensors live.

    Attributes:
        layers: their shapes.
        states: by layer, its tensors ``[num_blocks, *dims]``, in the order of its shapes.
        num_tokens: int64 ``[num_blocks]``: after how many of a block's tokens its states are; 0: there are none.

    Raises:
        RuntimeError: the tensors do not fit into the device's memory.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[StateShape]],
        num_blocks: int,
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers = [tuple(shapes) for shapes in layers]
        self.block_size = block_size
        self.states = [
            [torch.empty(num_blocks, *shape.dims, dtype=shape.dtype, device=device) for shape in shapes]
            for shapes in layers
        ]
        self.num_tokens = torch.zeros(num_blocks, dtype=torch.int64, device=device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of it, each ``[num_blocks, ...]``."""
        return [*(state for states in self.states for state in states), self.num_tokens]

    def check(self, blocks: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Check that sequences can go on from ``blocks``, int64 ids. On a GPU, nothing is checked: it would be waited for.

        States cannot be taken back: a sequence that went on from another token would be wrong without a sign of it.

        Raises:
            RuntimeError: the states in one are not those after ``num_tokens``, int64, of its tokens.
        """
        if self.num_tokens.is_cuda:
            return
        found = self.num_tokens[blocks]
        if not torch.equal(found, num_tokens):
            index = int((found != num_tokens).nonzero()[0])
            raise RuntimeError(
                f"block {int(blocks[index])}: expected states after {int(num_tokens[index])} of its tokens, got those after "
                f"{int(found[index])}"
            )

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Carry out the cache's queued copies, in order: a later one may read what an earlier one wrote."""
        for copy in copies:
            for tensor in self.tensors:
                tensor[copy.target] = tensor[copy.source]


def states_nbytes(layers: Sequence[Sequence[StateShape]]) -> int:
    """Bytes that the states in one block take, over all layers; 0 if there are none."""
    if not layers:
        return 0
    return sum(shape.nbytes for shapes in layers for shape in shapes) + torch.int64.itemsize
