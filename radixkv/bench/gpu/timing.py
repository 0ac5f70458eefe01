"""How GPU work is timed, and what the GPU could do at most."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from radixkv.bench.common.machine import describe_machine

# Read between two runs, so that nothing of the first is left in the cache: several times the largest cache of any GPU.
_FILLER_BYTES = 512 << 20
_COPIED_BYTES = 4 << 30
_MATRIX_SIZE = 8192
_MIN_RUNS, _MAX_RUNS, _SECONDS = 10, 200, 0.2


@dataclass(frozen=True, slots=True)
class Limits:
    """A GPU's measured limits.

    Attributes:
        bytes_per_s: of a copy within its memory, bytes read and bytes written both counted.
        read_bytes_per_s: of reading alone, to find the largest of many numbers.
        bf16_flops: operations a second of a large bfloat16 matrix product on random numbers.
    """

    bytes_per_s: float
    read_bytes_per_s: float
    bf16_flops: float

    def in_words(self) -> str:
        """All of them on a line."""
        copied, read = (f"{speed / 1e12:.2f} TB/s" for speed in (self.bytes_per_s, self.read_bytes_per_s))
        return f"copy {copied}, read {read}, bfloat16 {self.bf16_flops / 1e12:.0f} TFLOP/s"


def require_gpu() -> None:
    """Refuse to measure without one.

    Raises:
        ValueError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ValueError("this bench measures a GPU, and there is no CUDA device here")


def median_seconds(work: Callable[[], object]) -> float:
    """Median seconds of ``work``, replayed as a CUDA graph, so that no launch from Python is counted.

    Before each run the L2 cache is filled by reading something else. Lines filled by writing would still have to go to memory
    while ``work`` runs, at its cost.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    filler = torch.zeros(_FILLER_BYTES // 4, dtype=torch.int32, device="cuda")
    first = _replay(graph, filler, _MIN_RUNS)
    return _replay(graph, filler, max(_MIN_RUNS, min(_MAX_RUNS, int(_SECONDS / first))))


def _replay(graph: torch.cuda.CUDAGraph, filler: torch.Tensor, runs: int) -> float:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    for start, end in events:
        filler.amax()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    milliseconds: float = statistics.median(start.elapsed_time(end) for start, end in events)
    return milliseconds / 1e3


def measure_limits() -> Limits:
    """Copy 4 GiB, read them, and multiply two matrices of 8,192 x 8,192; the medians.

    The copy is a kernel's: in a graph, torch's own copies run on a slower copy engine, at 2.7 TB/s on an H200 instead of 4.3.
    """
    source = torch.ones(_COPIED_BYTES // 4, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    copy = median_seconds(lambda: torch.bitwise_not(source, out=target))
    read = median_seconds(lambda: source.amax())
    left, right = (torch.randn(_MATRIX_SIZE, _MATRIX_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = median_seconds(lambda: left @ right)
    return Limits(2 * _COPIED_BYTES / copy, _COPIED_BYTES / read, 2 * _MATRIX_SIZE**3 / product)


def describe_gpu() -> dict[str, Any]:
    """The machine, with its GPU."""
    return {
        **describe_machine("torch", "triton", "transformers"),
        "gpu": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "gpu_gib": round(torch.cuda.get_device_properties().total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
    }
