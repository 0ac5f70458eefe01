"""Capturing work on a GPU as a CUDA graph: one launch instead of a thousand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

# Does the work again, with the addresses that it had when it was captured.
Replay = Callable[[], object]


class GraphCapture:
    """Captures graphs of one device that run one at a time, so that they share the memory of what they compute.

    Args:
        device: a CUDA device; also the current one whenever something is captured.
    """

    def __init__(self, device: torch.device) -> None:
        # One of its own. torch's default is one for the whole process, which belongs to the first device that captured.
        self._stream = torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], object]) -> Replay:
        """Run ``work`` twice, then capture it.

        Raises:
            RuntimeError: it asks the GPU for a value, as some mixtures of experts do, or does not fit into memory.
        """
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                # Outside the graph first, because kernels compile and libraries initialise.
                work()
                # A failed capture would leave torch's allocator in capture mode for good; so what cannot be captured is
                # detected before.
                with _synchronising_is_an_error():
                    work()
        finally:
            current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # A capture that fails leaves its own stream behind as the current one. Other threads, such as another engine's, may
        # allocate and wait meanwhile.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"),
        ):
            work()
        return graph.replay


@contextmanager
def _synchronising_is_an_error() -> Iterator[None]:
    """Make torch raise a RuntimeError where it would wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
