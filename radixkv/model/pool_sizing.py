"""How many blocks the key-value pool gets."""

from __future__ import annotations

from collections.abc import Callable

import torch

DEFAULT_CPU_BYTES = 1 << 30


def choose_num_blocks(
    block_bytes: int,
    max_useful: int,
    device: torch.device,
    *,
    kv_cache_memory_bytes: int | None,
    gpu_memory_utilization: float,
    measure_activations: Callable[[], int],
) -> int:
    """Blocks that the memory allows.

    Args:
        block_bytes: of one block in all layers.
        max_useful: more blocks than this a CPU does not take unasked.
        kv_cache_memory_bytes: exactly so many bytes; None: 1 GiB on a CPU, what is left on a GPU.
        gpu_memory_utilization: share of a GPU's memory that all of this process and others may use.
        measure_activations: runs the largest step and returns the bytes that it took and gave back.

    Raises:
        ValueError: not one block fits; with the figures.
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
        return max(1, min(DEFAULT_CPU_BYTES // block_bytes, max_useful))
    activations = measure_activations()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    left = int(total * gpu_memory_utilization) - (total - free) - activations
    if left < block_bytes:
        raise ValueError(
            f"gpu_memory_utilization: {gpu_memory_utilization} of {total / 2**30:.1f} GiB leaves {left / 2**30:.2f} GiB "
            f"beside {(total - free) / 2**30:.1f} GiB in use and {activations / 2**30:.1f} GiB for a step, "
            f"less than a block of {block_bytes:,} bytes"
        )
    return left // block_bytes
