"""The number of blocks of the KV pool."""

from __future__ import annotations

from collections.abc import Callable

import torch

from radixkv.config import DEFAULT_CPU_POOL_BYTES


def choose_num_blocks(
    block_bytes: int,
    max_useful: int,
    device: torch.device,
    *,
    kv_cache_memory_bytes: int | None,
    gpu_memory_utilization: float,
    measure_activations: Callable[[], int],
    measure_graphs: Callable[[], int],
) -> int:
    """Blocks that fit into memory.

    Args:
        block_bytes: bytes of one block in all layers.
        max_useful: on a CPU, no more blocks than this unless ``kv_cache_memory_bytes`` is given.
        kv_cache_memory_bytes: bytes to use; None: up to 1 GiB on a CPU, the available memory on a GPU.
        gpu_memory_utilization: share of a GPU's memory that this and all other processes may use together.
        measure_activations: runs the largest step and returns its peak of temporary bytes.
        measure_graphs: returns the bytes that CUDA graphs will take.

    Raises:
        ValueError: not one block fits, or ``gpu_memory_utilization`` is out of range.
    """
    if not 0.0 < gpu_memory_utilization <= 1.0:
        raise ValueError(f"gpu_memory_utilization: expected above 0 and up to 1, got {gpu_memory_utilization!r}")
    if kv_cache_memory_bytes is not None:
        if kv_cache_memory_bytes < block_bytes:
            raise ValueError(
                f"kv_cache_memory_bytes must hold at least one block of {block_bytes:,} bytes, "
                f"got {kv_cache_memory_bytes!r}"
            )
        return kv_cache_memory_bytes // block_bytes
    if device.type != "cuda":
        return max(1, min(DEFAULT_CPU_POOL_BYTES // block_bytes, max_useful))
    activations, graphs = measure_activations(), measure_graphs()
    free, total = free_memory(device), torch.cuda.mem_get_info(device)[1]
    available = int(total * gpu_memory_utilization) - (total - free) - activations - graphs
    if available < block_bytes:
        raise ValueError(
            f"gpu_memory_utilization: {gpu_memory_utilization} of {total / 2**30:.1f} GiB leaves {available / 2**30:.2f} GiB "
            f"beside {(total - free) / 2**30:.1f} GiB in use, {activations / 2**30:.1f} GiB for a step and "
            f"{graphs / 2**30:.1f} GiB for CUDA graphs, less than a block of {block_bytes:,} bytes"
        )
    return available // block_bytes


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a GPU, including those that torch keeps in reserve."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
