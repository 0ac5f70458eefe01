"""Decoding steps as CUDA graphs: one launch instead of a thousand.

A graph is captured for each padded batch size when it is first met, and replayed from then on. What changes between steps
lies in the buffers of a `PaddedDecode`. Without a GPU the same buffers are run through eagerly, which is how tests reach
them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from radixkv.attention import AttentionBatch
from radixkv.attention.padded_decode import PaddedDecode
from radixkv.attention.triton_backend import TritonAttention
from radixkv.memory import KVPool

_log = logging.getLogger(__name__)

# The model's logits ``[rows, vocabulary]`` for every row of a padded batch.
Forward = Callable[[PaddedDecode], torch.Tensor]


def padded_size(num_rows: int) -> int:
    """The graph's size for so many rows: powers of two up to 8, then multiples of 8."""
    return 1 << (num_rows - 1).bit_length() if num_rows <= 8 else -(-num_rows // 8) * 8


class DecodeGraphs:
    """Runs decoding batches of one model over one pool.

    Args:
        pool: where keys and values lie.
        forward: runs the model on a `PaddedDecode`'s token ids and positions.
    """

    def __init__(self, pool: KVPool, forward: Forward) -> None:
        self._pool = pool
        self._forward = forward
        self._on_gpu = pool.keys[0].device.type == "cuda"
        self._memory = torch.cuda.graph_pool_handle() if self._on_gpu else None
        self._captured: dict[int, tuple[PaddedDecode, Callable[[], torch.Tensor]]] = {}
        self._failed = False

    def run(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor | None:
        """Logits ``[rows, vocabulary]`` in the batch's order, valid until the next call; None: run this batch eagerly.

        Args:
            token_ids: int64, one a row in the batch's order, on the device.
        """
        assert isinstance(batch, TritonAttention)
        if self._failed:
            return None
        size = padded_size(len(token_ids))
        captured = self._captured.get(size)
        padded = PaddedDecode(size, self._pool) if captured is None else captured[0]
        if not padded.load(batch.plan):
            return None
        padded.token_ids[: len(token_ids)].copy_(token_ids, non_blocking=True)
        if captured is None:
            replay = self._capture(padded)
            if replay is None:
                return None
            captured = self._captured[size] = (padded, replay)
        return captured[1]()[: len(token_ids)]

    def _capture(self, padded: PaddedDecode) -> Callable[[], torch.Tensor] | None:
        if not self._on_gpu:
            return lambda: self._forward(padded)
        # Once outside the graph, on a stream of its own: kernels compile and libraries set themselves up. It writes what
        # the graph will write again.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._forward(padded)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._memory):
                logits = self._forward(padded)
        except RuntimeError as error:
            # A model that asks the GPU for a value in its forward pass, as some mixtures of experts do, cannot be captured.
            _log.warning("decoding runs without CUDA graphs: the model cannot be captured (%s)", error)
            self._failed = True
            return None

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay
