"""The key and value tensors that the cache's block ids stand for.

Layout, per layer and for keys and values apart::

    [num_blocks, block_size, num_kv_heads, head_dim]

With the heads inside, a run of consecutive block ids is one ``[tokens, heads, dim]`` view without a copy, and writing
a token is one row. The alternative, heads outermost, was measured on two CPU cores at the shapes of SmolLM2-135M: attention
over one long view is 10 to 20 % faster with it, but gathering scattered blocks 45 to 80 % slower; decoding many sequences
gathers, so the heads stay inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from radixkv.cache import BlockCopy
from radixkv.memory.state_pool import StatePool, StateShape, states_nbytes


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores per token: ``num_kv_heads`` keys of ``key_dim`` and values of ``value_dim``."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements_per_token(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class KVPool:
    """Keys and values of ``num_blocks`` physical blocks for every layer, on one device.

    Args:
        layers: the shape of each attention layer; layers may differ.
        num_blocks: physical blocks, the same number for every layer.
        block_size: tokens per block.
        dtype: element type of keys and values.
        device: where the tensors live.
        recurrent_layers: by recurrent layer, the shapes of its states.

    Attributes:
        states: those of the recurrent layers; None: there are none.

    Raises:
        ValueError: a size is not positive, or there is no layer.
        MemoryError: the tensors do not fit into the device's memory.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        recurrent_layers: Sequence[Sequence[StateShape]] = (),
    ) -> None:
        if not layers:
            raise ValueError("layers: expected at least one attention layer, got none")
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.block_nbytes = block_nbytes(layers, block_size, dtype) + states_nbytes(recurrent_layers)
        # Left uninitialized: the operating system hands out pages when they are first written, so a large pool costs
        # nothing before it is used. A slot is never read before it is written.
        try:
            self.keys = [
                torch.empty(num_blocks, block_size, s.num_kv_heads, s.key_dim, dtype=dtype, device=device)
                for s in layers
            ]
            self.values = [
                torch.empty(num_blocks, block_size, s.num_kv_heads, s.value_dim, dtype=dtype, device=device)
                for s in layers
            ]
            self.states = StatePool(recurrent_layers, num_blocks, block_size, device) if recurrent_layers else None
        except RuntimeError as error:
            raise MemoryError(
                f"no memory for {num_blocks} blocks of {self.block_nbytes:,} bytes "
                f"({num_blocks * self.block_nbytes / 2**30:.2f} GiB): lower num_blocks or kv_cache_memory_bytes"
            ) from error
        # The same memory as rows of tokens: row = block id * block_size + position in the block.
        self.key_rows = [k.view(num_blocks * block_size, *k.shape[2:]) for k in self.keys]
        self.value_rows = [v.view(num_blocks * block_size, *v.shape[2:]) for v in self.values]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.block_nbytes

    def scales(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The factors of stored keys and values, float32 ``[kv heads]``; None: they are stored as they are."""
        return None, None

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store ``key`` and ``value``, both ``[tokens, heads, dim]``, in the token rows ``slots`` (``[tokens]`` int64).

        Returns:
            Both as they will be read from now on. Attention to new tokens must use these: otherwise what a token sees
            would depend on which others were computed with it.
        """
        self.key_rows[layer].index_copy_(0, slots, key)
        self.value_rows[layer].index_copy_(0, slots, value)
        return key, value

    def read(self, layer: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, ``[tokens, heads, dim]``, of the token rows ``start .. stop``."""
        return self.key_rows[layer][start:stop], self.value_rows[layer][start:stop]

    def gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, ``[tokens, heads, dim]``, of the token rows ``slots`` (``[tokens]`` int64)."""
        return self.key_rows[layer].index_select(0, slots), self.value_rows[layer].index_select(0, slots)

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Carry out queued copies of keys and values, in order: a later one may read what an earlier one wrote."""
        for copy in copies:
            for tensors in (self.keys, self.values):
                for tensor in tensors:
                    tensor[copy.target, : copy.num_tokens] = tensor[copy.source, : copy.num_tokens]


def block_nbytes(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one physical block takes over all layers, keys and values both."""
    return block_size * dtype.itemsize * sum(shape.elements_per_token for shape in layers)
