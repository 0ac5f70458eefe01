"""Blocks of a pool as rows of bytes, as the tiers below it keep them.

A row has, layer by layer, the block's keys and values as they are stored, so a pool in fp8 has rows of half the size::

    | keys of layer 0 | values of layer 0 | keys of layer 1 | ... | states of recurrent layers | after how many tokens
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.memory.kv_pool import KVPool
from radixkv.memory.pages import take_pages
from radixkv.memory.spare_rows import SpareRows
from radixkv.memory.upload import to_device
from radixkv.tiers.moves.pool_rows import PoolRows
from radixkv_cpu import BlockParts, library

Index = slice | NDArray[np.int32]

# Average length of runs from which a copy by slices is faster than one by indices.
_SHORTEST_RUN = 4


class BlockRows(PoolRows):
    """Reads and writes whole blocks of ``pool`` as bytes.

    Attributes:
        nbytes: of a block.
        num_blocks: of the pool.
    """

    def __init__(self, pool: KVPool) -> None:
        tensors = [tensor for pair in zip(pool.keys, pool.values, strict=True) for tensor in pair]
        if pool.states is not None:
            tensors += pool.states.tensors
        self._rows = [tensor.view(pool.num_blocks, -1).view(torch.uint8) for tensor in tensors]
        self._stops = np.cumsum([rows.shape[1] for rows in self._rows]).tolist()
        self._device = tensors[0].device
        self.nbytes: int = self._stops[-1]
        self.num_blocks = pool.num_blocks
        self._block_size = pool.block_size
        # The unit of copies: scattered rows take half as long in words of eight bytes as in bytes, and a GPU needs a thread
        # for each word.
        self._word = np.dtype(np.int64 if all(stop % 8 == 0 for stop in self._stops) else np.uint8)
        columns = [slice(*ends) for ends in pairwise([0, *(stop // self._word.itemsize for stop in self._stops)])]
        words = [rows.view(_device_word(self._word)) for rows in self._rows]
        # Each tensor as rows of words, and its columns in the rows of all tensors; on the host, as numpy's arrays, too.
        self._device_rows = list(zip(words, columns, strict=True))
        self._host_rows: list[tuple[NDArray[np.generic], slice]] = []
        if self._device.type != "cuda":
            self._host_rows = [(rows.numpy(), own) for rows, own in self._device_rows]
        self._parts: BlockParts | None = None
        if self._device.type == "cpu" and library() is not None:
            self._parts = BlockParts(self._rows)
        self._spare = SpareRows(self.nbytes)
        # Whether `prepare` has taken a block's pages.
        self._prepared = np.zeros(pool.num_blocks, dtype=bool)

    def read(self, block_ids: NDArray[np.int32]) -> torch.Tensor:
        """The bytes of blocks, uint8 ``[blocks, nbytes]``, on the pool's device, as all work launched so far leaves them.

        For the thread that computes: on a CPU, its computing threads copy.

        Raises:
            MemoryError, RuntimeError: numpy and torch have no memory for them.
        """
        if self._device.type != "cuda":
            out = self._spare.take(len(block_ids))
            if self._parts is not None:
                self._parts.read(torch.from_numpy(block_ids), out, in_parallel=len(block_ids) > 1)
                return out
            words = out.numpy().view(self._word)
            for run, blocks in _runs(block_ids):
                for part, columns in self._host_rows:
                    words[run, columns] = part[blocks]
            return out
        out = torch.empty(len(block_ids), self.nbytes, dtype=torch.uint8, device=self._device)
        ids = to_device(torch.from_numpy(block_ids.astype(np.int64)), self._device)
        out_words = out.view(_device_word(self._word))
        for rows, columns in self._device_rows:
            torch.index_select(rows, 0, ids, out=out_words[:, columns])
        return out

    def release(self, data: torch.Tensor) -> None:
        """End the use of what `read` returned, and of what `to_host` made of it. Any thread may call."""
        if not data.is_cuda:
            self._spare.give_back(data)

    def fence(self) -> torch.cuda.Event | None:
        """Mark what was launched so far, for `write`; None on a CPU, where nothing keeps running after a call."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def to_host(self, data: torch.Tensor, fence: torch.cuda.Event | None) -> NDArray[np.uint8]:
        """What `read` returned before ``fence`` was made, in host memory; may be called once.

        From a GPU it is copied on a separate stream. The GPU's memory is free then, however long the copy is used.
        """
        if fence is None:
            return data.numpy()
        stream = self._read_stream
        with torch.cuda.stream(stream):
            stream.wait_event(fence)
            on_host = torch.empty(data.shape, dtype=torch.uint8, pin_memory=True)
            on_host.copy_(data, non_blocking=True)
        _wait_for(stream)
        data.untyped_storage().resize_(0)
        return on_host.numpy()

    def erase_behind(self, row: NDArray[np.uint8], num_tokens: int) -> None:
        """Overwrite with zeros what a row of `to_host` holds behind its first ``num_tokens``. Any thread may call."""
        for start, stop in pairwise([0, *self._stops]):
            row[start + (stop - start) // self._block_size * num_tokens : stop] = 0

    def prepare(self, block_ids: NDArray[np.int32]) -> None:
        """Prepare the memory of blocks that `write` will be given, without changing them. Any thread may call."""
        if self._device.type == "cuda":
            return
        for _, blocks in _runs(np.sort(block_ids[~self._prepared[block_ids]])):
            if not isinstance(blocks, slice):
                return  # scattered: preparing takes longer than writing unprepared blocks
            for rows, _ in self._host_rows:
                part = rows[blocks]
                take_pages(part.ctypes.data, part.nbytes)
            self._prepared[blocks] = True

    def write(self, block_ids: NDArray[np.int32], data: NDArray[np.uint8], fence: object) -> None:
        """Overwrite blocks that nothing else uses; returns when their bytes are in place. Any thread may call.

        Args:
            fence: from `fence`: what was launched before it may still use the blocks; on a GPU they are written after that,
                on a separate stream, so that nothing else waits for them.
        """
        if isinstance(fence, torch.cuda.Event):
            self._write_on_gpu(block_ids, torch.from_numpy(data), fence)
            return
        if self._parts is not None:
            self._parts.write(torch.from_numpy(block_ids), torch.from_numpy(data))
            return
        words = data.view(self._word)
        for run, blocks in _runs(block_ids):
            for rows, columns in self._host_rows:
                rows[blocks] = words[run, columns]

    def _write_on_gpu(self, block_ids: NDArray[np.int32], data: torch.Tensor, fence: torch.cuda.Event) -> None:
        stream = self._write_stream
        try:
            with torch.cuda.stream(stream):
                stream.wait_event(fence)
                ids = to_device(torch.from_numpy(block_ids.astype(np.int64)), self._device)
                # One copy for all; from pinned memory, it does not involve the processor.
                words = data.to(self._device, non_blocking=True).view(_device_word(self._word))
                for rows, columns in self._device_rows:
                    rows.index_copy_(0, ids, words[:, columns])
        finally:
            _wait_for(stream)  # whatever fails: nothing may be written once the blocks are another's

    # One stream for each direction: with a new one for each copy, torch would keep memory for all that it has.

    @cached_property
    def _read_stream(self) -> torch.cuda.Stream:
        return _stream_for_copies(self._device)

    @cached_property
    def _write_stream(self) -> torch.cuda.Stream:
        return _stream_for_copies(self._device)


def _stream_for_copies(device: torch.device) -> torch.cuda.Stream:
    """A stream for copies of blocks alone.

    torch hands out the same 32 streams of a priority in turn. Attention takes those of the default priority, and would wait
    behind a copy; so do CUDA graphs, whose capture fails if anything else runs on one of its streams.
    """
    return torch.cuda.Stream(device, priority=-1)


def _wait_for(stream: torch.cuda.Stream) -> None:
    """Wait until all that was launched on a stream is done.

    By an event: `torch.cuda.Stream.synchronize` raises in all threads while one of them checks what it is about to capture
    (`radixkv.model.graphs.cuda_graph`).
    """
    stream.record_event().synchronize()


def _device_word(word: np.dtype[Any]) -> torch.dtype:
    return torch.int64 if word.itemsize == 8 else torch.uint8


def _runs(block_ids: NDArray[np.int32]) -> Iterator[tuple[slice, Index]]:
    """Runs of consecutive ids: where each is in ``block_ids``, and its blocks. If runs are short, all ids as they are."""
    breaks = (np.flatnonzero(np.diff(block_ids) != 1) + 1).tolist()
    if len(block_ids) < _SHORTEST_RUN * len(breaks):
        yield slice(len(block_ids)), block_ids
        return
    for start, stop in pairwise([0, *breaks, len(block_ids)] if len(block_ids) else []):
        first = int(block_ids[start])
        yield slice(start, stop), slice(first, first + stop - start)
