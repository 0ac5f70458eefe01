"""Capturing work on a GPU as a CUDA graph: one launch instead of a thousand."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import ClassVar

import torch

# Repeats the work, at the addresses that it used when it was captured.
Replay = Callable[[], object]

# How many different streams per device torch hands out, in turn.
_NUM_STREAMS = 32


class GraphCapture:
    """Captures graphs of one device that run one at a time, so that they share the memory of what they compute.

    It must live as long as its graphs do.

    Args:
        device: a CUDA device; also the current one whenever something is captured.
    """

    # Per process, as torch's streams and its checks are.
    _alive: ClassVar[weakref.WeakSet[GraphCapture]] = weakref.WeakSet()
    _checking: ClassVar[Lock] = Lock()

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream = _stream_beside(device, [other._stream for other in self._alive])
        self._memory = torch.cuda.graph_pool_handle()
        self._alive.add(self)

    def __call__(self, work: Callable[[], object]) -> Replay:
        """Run ``work`` twice, then capture it.

        Raises:
            RuntimeError: it waits for a value from the GPU, as some mixtures of experts do, or does not fit into memory.
        """
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                # Outside the graph first, because kernels compile and libraries initialise.
                work()
                # A failed capture would leave torch's allocator in capture mode for good; so what cannot be captured is
                # detected before. Two engines that start at a time would leave the check switched on.
                with self._checking, _synchronising_is_an_error():
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


def _stream_beside(device: torch.device, others: Sequence[torch.cuda.Stream]) -> torch.cuda.Stream:
    """A stream that is none of the others.

    Not torch's default stream for captures: the process has only one, of the first device that captured. Nor a stream that
    another engine's graphs were captured on: torch keeps a cuBLAS workspace per stream, whose address is in those graphs, and
    frees it (2.13) when any graph of the stream is released.
    """
    stream = torch.cuda.Stream(device)
    for _ in range(_NUM_STREAMS):
        if stream not in others:
            break
        stream = torch.cuda.Stream(device)
    return stream


@contextmanager
def _synchronising_is_an_error() -> Iterator[None]:
    """Make torch raise a RuntimeError where it would wait for the GPU, in whichever thread."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
