"""Blocks of a pool as rows of bytes: what tiers below it keep.

A row is, layer by layer, the block's keys and its values as they are stored, so a pool in fp8 has rows of half the size::

    | keys of layer 0 | values of layer 0 | keys of layer 1 | ...
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.memory.kv_pool import KVPool
from radixkv.memory.upload import to_device
from radixkv.tiers.pool_rows import PoolRows


class BlockRows(PoolRows):
    """Reads and writes whole blocks of ``pool`` as bytes.

    Attributes:
        nbytes: of a block.
    """

    def __init__(self, pool: KVPool) -> None:
        tensors = [tensor for pair in zip(pool.keys, pool.values, strict=True) for tensor in pair]
        self._rows = [tensor.view(pool.num_blocks, -1).view(torch.uint8) for tensor in tensors]
        self._stops = np.cumsum([rows.shape[1] for rows in self._rows]).tolist()
        self._device = tensors[0].device
        self.nbytes: int = self._stops[-1]
        # What rows are copied in: of eight bytes, they take half as long as of one.
        self._word = np.dtype(np.int64 if all(stop % 8 == 0 for stop in self._stops) else np.uint8)

    def read(self, block_ids: NDArray[np.int32]) -> torch.Tensor:
        """The bytes of blocks, uint8 ``[blocks, nbytes]``, on the pool's device, as they are when what was launched has run.

        Args:
            block_ids: int32 ``[blocks]``.
        """
        ids = to_device(torch.from_numpy(block_ids.astype(np.int64)), self._device)
        out = torch.empty(len(block_ids), self.nbytes, dtype=torch.uint8, device=self._device)
        start = 0
        for rows, stop in zip(self._rows, self._stops, strict=True):
            torch.index_select(rows, 0, ids, out=out[:, start:stop])
            start = stop
        return out

    def fence(self) -> torch.cuda.Event | None:
        """Marks what was launched so far, for `write`; None on a CPU, where nothing runs after a call."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def to_host(self, data: torch.Tensor, fence: torch.cuda.Event | None) -> NDArray[np.uint8]:
        """What `read` returned, in host memory; from a GPU copied on a stream of its own.

        Args:
            data: of `read`.
            fence: made after that call.
        """
        if fence is None:
            return data.numpy()
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            stream.wait_event(fence)
            on_host = torch.empty(data.shape, dtype=torch.uint8, pin_memory=True)
            on_host.copy_(data, non_blocking=True)
        stream.synchronize()
        return on_host.numpy()

    def write(self, block_ids: NDArray[np.int32], data: NDArray[np.uint8], fence: object) -> None:
        """Overwrite blocks that nothing else uses; returns when their bytes are in place. Any thread may call.

        Args:
            block_ids: int32 ``[blocks]``, each once.
            data: uint8 ``[blocks, nbytes]``.
            fence: of `fence`: what was launched before may still read or write the blocks; on a GPU they are written after
                that, on a stream of their own, so that nothing else waits for them.
        """
        if isinstance(fence, torch.cuda.Event):
            self._write_on_gpu(block_ids, torch.from_numpy(data), fence)
            return
        start, words = 0, data.view(self._word)
        for rows, stop in zip(self._rows, self._stops, strict=True):
            # By numpy: torch's assignment by index takes six times as long for bytes.
            rows.numpy().view(self._word)[block_ids] = words[:, start : stop // self._word.itemsize]
            start = stop // self._word.itemsize

    def _write_on_gpu(self, block_ids: NDArray[np.int32], data: torch.Tensor, fence: torch.cuda.Event) -> None:
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            stream.wait_event(fence)
            ids = to_device(torch.from_numpy(block_ids.astype(np.int64)), self._device)
            # One copy for all; from pinned memory it needs no help of the processor.
            on_device = data.to(self._device, non_blocking=True)
            start = 0
            for rows, stop in zip(self._rows, self._stops, strict=True):
                rows.index_copy_(0, ids, on_device[:, start:stop])
                start = stop
        stream.synchronize()
