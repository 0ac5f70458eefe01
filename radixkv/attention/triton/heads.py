"""Which heads Triton's kernels can take."""

from __future__ import annotations

from radixkv.memory import LayerShape
from radixkv_kernels import TILE_ROWS
from radixkv_kernels.checks import MAX_HEAD_DIM


def check_heads(num_query_heads: int, layer: LayerShape) -> None:
    """Raise a ValueError for heads that are too large, or too many in a group."""
    head_dim, group = max(layer.key_dim, layer.value_dim), num_query_heads // layer.num_kv_heads
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"head size: expected at most {MAX_HEAD_DIM} with Triton's kernels, which attend on a GPU, got {head_dim}"
        )
    if group > TILE_ROWS[-1]:
        raise ValueError(
            f"query heads per key-value head: expected at most {TILE_ROWS[-1]} with Triton's kernels, which attend on a GPU, "
            f"got {group}"
        )
