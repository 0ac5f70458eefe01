"""Decoding steps as CUDA graphs: one launch instead of a thousand.

A graph is captured for each padded batch size when it is first met, one for batches that share and one for those that do
not, and replayed from then on. What changes between steps lies in the buffers of a `PaddedDecode`. Without a GPU, as in
tests, the model runs eagerly over the same buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from radixkv.attention import AttentionBatch
from radixkv.attention.triton import TritonAttention
from radixkv.attention.triton.buffers import padded_size
from radixkv.attention.triton.launches import PartialResults
from radixkv.attention.triton.padded_decode import PaddedDecode
from radixkv.memory import KVPool

_log = logging.getLogger(__name__)

# The model's logits ``[rows, vocabulary]`` for every row of a padded batch.
Forward = Callable[[PaddedDecode], torch.Tensor]


class DecodeGraphs:
    """Runs decoding batches of one model over one pool.

    Args:
        pool: where keys and values lie.
        forward: runs the model on a `PaddedDecode`'s token ids and positions.
    """

    def __init__(self, pool: KVPool, forward: Forward) -> None:
        self._pool = pool
        self._forward = forward
        device = pool.keys[0].device
        self._on_gpu = device.type == "cuda"
        self._memory = torch.cuda.graph_pool_handle() if self._on_gpu else None
        self._side = torch.cuda.Stream(device) if self._on_gpu else None
        self._partials = PartialResults(device)
        self._captured: dict[tuple[int, bool], tuple[PaddedDecode, Callable[[], torch.Tensor]]] = {}
        self._failed = False

    def run(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor | None:
        """Logits ``[rows, vocabulary]`` in the batch's order, valid until the next call; None: run this batch eagerly.

        Args:
            token_ids: int64, one per row in the batch's order, on the device.
        """
        assert isinstance(batch, TritonAttention)
        if self._failed:
            return None
        size, flat = padded_size(len(token_ids)), batch.plan.is_flat
        captured = self._captured.get((size, flat))
        padded = captured[0] if captured else PaddedDecode(size, self._pool, batch.buffers, flat, self._partials)
        if not padded.load(batch):
            return None
        padded.token_ids[: len(token_ids)].copy_(token_ids, non_blocking=True)
        if captured is None:
            replay = self._capture(padded)
            if replay is None:
                return None
            captured = self._captured[size, flat] = (padded, replay)
        return captured[1]()[: len(token_ids)]

    def _capture(self, padded: PaddedDecode) -> Callable[[], torch.Tensor] | None:
        if self._side is None:
            return lambda: self._forward(padded)
        current = torch.cuda.current_stream()
        # Outside the graph first, on a stream of its own, because kernels compile and libraries initialise. It writes what
        # the graph will write again.
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            self._forward(padded)
        current.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        try:
            # A model that asks the GPU for a value in its forward pass, as some mixtures of experts do, cannot be captured.
            # A failed capture would leave torch's allocator in capture mode for good; so such a model is detected before.
            with torch.cuda.stream(self._side), _synchronising_is_an_error():
                self._forward(padded)
            current.wait_stream(self._side)
            # A capture that fails leaves its own stream behind as the current one.
            with torch.cuda.stream(current), torch.cuda.graph(graph, pool=self._memory):
                logits = self._forward(padded)
        except RuntimeError as error:
            _log.warning("decoding runs without CUDA graphs: the model cannot be captured (%s)", error)
            current.wait_stream(self._side)
            self._failed = True
            return None

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay


@contextmanager
def _synchronising_is_an_error() -> Iterator[None]:
    """Make torch raise a RuntimeError where it would wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
