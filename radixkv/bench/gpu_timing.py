"""How GPU work is timed, and what the GPU could do at most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from radixkv.bench.machine import describe_machine


@dataclass(frozen=True, slots=True)
class Limits:
    """A GPU's measured limits.

    Attributes:
        bytes_per_s: of a copy within its memory, bytes read and bytes written both counted.
        bf16_flops: operations a second of a large bfloat16 matrix product on random numbers.
    """

    bytes_per_s: float
    bf16_flops: float


def require_gpu() -> None:
    """Refuse to measure without one.

    Raises:
        ValueError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ValueError("this bench measures a GPU, and there is no CUDA device here")


def median_seconds(work: Callable[[], object]) -> float:
    """Seconds of ``work``, replayed as a CUDA graph with a cold L2 cache, so that no launch from Python is counted."""
    import triton.testing  # heavy, and only there with a GPU

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    milliseconds: float = triton.testing.do_bench(graph.replay, warmup=25, rep=150, return_mode="median")
    return milliseconds / 1e3


def measure_limits() -> Limits:
    """Copy 4 GiB, and multiply two matrices of 8,192 x 8,192; the medians."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = median_seconds(lambda: target.copy_(source))
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = median_seconds(lambda: left @ right)
    return Limits(2 * source.numel() / copy, 2 * 8192**3 / product)


def describe_gpu() -> dict[str, Any]:
    """The machine, with its GPU."""
    return {
        **describe_machine("torch", "triton", "transformers"),
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
    }
