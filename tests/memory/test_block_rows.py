"""Blocks of a pool as rows of bytes, and the memory for them."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.dict_tier import DictTier
from support.tensors_on_cpu import OnCpu

from radixkv.memory import KVPool, StateShape, block_rows
from radixkv.memory.block_rows import BlockRows
from radixkv.memory.kv_pool import LayerShape
from radixkv.memory.spare_rows import SpareRows
from radixkv.tiers.moves.loader import BlockLoader
from radixkv.tiers.moves.prefix_keys import PrefixKeys
from radixkv.tiers.moves.writer import BlockWriter
from radixkv.tiers.stack import TierStack

LAYERS = [LayerShape(2, 8, 4), LayerShape(1, 3, 5)]
STATES = [[StateShape((3, 2), torch.bfloat16), StateShape((5,), torch.float32)], [StateShape((1,), torch.float32)]]


def filled_pool(
    layers: list[LayerShape], dtype: torch.dtype, states: Sequence[Sequence[StateShape]] = ()
) -> tuple[KVPool, list[torch.Tensor]]:
    """Twelve blocks of random bytes, and their tensors as bytes, in the order of a row."""
    pool = KVPool(layers, 12, 1 if len(layers) == 1 else 4, dtype, recurrent_layers=states)
    parts = [part for pair in zip(pool.keys, pool.values, strict=True) for part in pair]
    parts += [] if pool.states is None else pool.states.tensors
    tensors = [part.view(12, -1).view(torch.uint8) for part in parts]
    for seed, tensor in enumerate(tensors):
        tensor.copy_(torch.from_numpy(np.random.default_rng(seed).integers(0, 256, tensor.shape, dtype=np.uint8)))
    return pool, tensors


@pytest.mark.parametrize(
    ("layers", "dtype", "states"),
    [
        (LAYERS, torch.float32, []),
        (LAYERS, torch.float8_e4m3fn, []),
        ([LayerShape(1, 3, 5)], torch.float8_e4m3fn, []),
        (LAYERS, torch.bfloat16, STATES),
    ],
    ids=["float32", "fp8", "rows that are no words", "with states"],
)
@pytest.mark.parametrize(
    "ids", [[5, 6, 7, 8, 9, 10], [9, 2, 7, 0, 4, 11], [3, 4, 5, 6, 7, 8, 9, 0, 1, 2], [11], []], ids=str
)
@pytest.mark.parametrize("native", [True, False])
def test_blocks_come_back_as_they_were_wherever_they_are_put(
    layers: list[LayerShape],
    dtype: torch.dtype,
    states: list[list[StateShape]],
    ids: list[int],
    native: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not native:
        monkeypatch.setattr(block_rows, "library", lambda: None)
    pool, tensors = filled_pool(layers, dtype, states)
    before = [tensor.clone() for tensor in tensors]
    rows = BlockRows(pool)
    block_ids = np.array(ids, dtype=np.int32)
    data = rows.read(block_ids)
    kept = data.numpy().copy()
    first = b"".join(tensor[i].numpy().tobytes() for i in ids[:1] for tensor in tensors)
    assert kept[:1].tobytes() == first
    assert rows.nbytes == pool.block_nbytes
    rows.release(data)
    for tensor in tensors:
        tensor[ids] ^= 0xFF
    rows.prepare(block_ids)
    assert np.array_equal(rows.read(block_ids).numpy(), kept ^ 0xFF)
    rows.write(block_ids, kept, None)
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))


@pytest.mark.parametrize("heads", [LAYERS, [LayerShape(1, 3, 5)]], ids=["words", "rows that are no words"])
def test_what_a_gpu_reads_and_writes_is_what_a_cpu_does(
    heads: list[LayerShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as torch behaves alike on both."""
    pool, _ = filled_pool(heads, torch.float8_e4m3fn)
    block_ids, elsewhere = np.array([9, 2, 7], dtype=np.int32), np.array([1, 0, 11], dtype=np.int32)
    rows, expected = BlockRows(pool), BlockRows(pool).read(block_ids)
    rows._device = torch.device("cuda")
    monkeypatch.setattr(block_rows, "to_device", lambda tensor, device: tensor)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    with OnCpu():
        assert rows.read(block_ids).equal(expected)
        rows._write_on_gpu(elsewhere, expected, Mock())
    assert BlockRows(pool).read(elsewhere).equal(expected)


def test_blocks_are_copied_on_streams_that_neither_attention_nor_graphs_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those have normal priority, and torch hands the same ones out again and again."""
    pool = KVPool(LAYERS, 4, 4, torch.float32)
    rows, block_ids = BlockRows(pool), np.array([2, 1], dtype=np.int32)
    data = rows.read(block_ids)
    empty, priorities = torch.empty, []

    def new_stream(device: torch.device, priority: int = 0) -> Mock:
        priorities.append(priority)
        return Mock()

    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **options: empty(*size, **options))
    on_host = torch.from_numpy(rows.to_host(data.clone(), Mock()))
    assert on_host.equal(data)
    rows._write_on_gpu(block_ids, on_host, Mock())
    assert len(priorities) == 2
    assert max(priorities) < 0


def test_the_memory_of_a_gpu_is_free_once_its_blocks_are_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was held until tiers had written the blocks, for which they may take seconds."""
    rows, empty = BlockRows(KVPool(LAYERS, 4, 4, torch.float32)), torch.empty
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **options: empty(*size, **options))
    data = torch.ones(2, rows.nbytes, dtype=torch.uint8)
    assert rows.to_host(data, Mock()).all()
    assert data.untyped_storage().nbytes() == 0


def test_memory_is_used_again_when_it_is_given_back_and_not_before() -> None:
    spare = SpareRows(mmap.PAGESIZE, max_spare_bytes=8 * mmap.PAGESIZE)
    large, small = spare.take(6), spare.take(2)
    assert spare.take(2).data_ptr() not in (large.data_ptr(), small.data_ptr())
    addresses = large.data_ptr(), small.data_ptr()
    spare.give_back(large)
    spare.give_back(small)
    assert spare.take(1).data_ptr() == addresses[1]  # the smallest that suffices
    again = spare.take(5)
    assert again.data_ptr() == addresses[0]
    assert again.shape == (5, mmap.PAGESIZE)
    again[:] = 7
    spare.give_back(again)
    spare.give_back(torch.empty(4, mmap.PAGESIZE, dtype=torch.uint8))
    assert sum(storage.nbytes() for storage in spare._spare) == 4 * mmap.PAGESIZE  # both would be too much


def test_one_large_piece_does_not_push_out_the_memory_that_is_kept() -> None:
    spare = SpareRows(mmap.PAGESIZE, max_spare_bytes=8 * mmap.PAGESIZE)
    kept = spare.take(3)
    address = kept.data_ptr()
    spare.give_back(kept)
    spare.give_back(torch.empty(9, mmap.PAGESIZE, dtype=torch.uint8))
    assert spare.take(3).data_ptr() == address


def test_memory_goes_back_to_the_system_while_nobody_waits_for_the_lock() -> None:
    spare, locked = SpareRows(8, max_spare_bytes=64), []
    for _ in range(3):
        array = np.zeros((4, 8), np.uint8)
        weakref.finalize(array, lambda: locked.append(spare._lock.locked()))
        spare.give_back(torch.from_numpy(array))
        del array
    assert locked == [False]


def test_pages_are_taken_of_runs_of_blocks_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KVPool([LayerShape(2, 8, 4)], 16, 4, torch.float32)
    rows, taken = BlockRows(pool), list[tuple[int, int]]()
    monkeypatch.setattr(block_rows, "take_pages", lambda address, nbytes: taken.append((address, nbytes)))

    def spans(start: int, stop: int) -> list[tuple[int, int]]:
        return [
            (tensor[start].data_ptr(), (stop - start) * tensor[0].nbytes) for tensor in (pool.keys[0], pool.values[0])
        ]

    for ids, expected in (
        ([9, 3, 6], []),  # scattered
        ([5, 4, 7, 6], spans(4, 8)),  # one of them was among the scattered
        ([2, 3, 4, 5, 6, 7, 8, 9], spans(2, 4) + spans(8, 10)),  # those between are ready
        ([2, 3, 4, 5, 6, 7, 8, 9], []),
    ):
        taken.clear()
        rows.prepare(np.array(ids, dtype=np.int32))
        assert taken == expected, ids


class _Prepared:
    """Rows that record what is prepared."""

    nbytes = 1 << 20
    num_blocks = 1100

    def __init__(self, num_expected: int) -> None:
        self.ids: list[int] = []
        self.num_expected = num_expected
        self.done = threading.Event()

    def prepare(self, block_ids: NDArray[np.int32]) -> None:
        self.ids += block_ids.tolist()
        if len(self.ids) >= self.num_expected:
            self.done.set()


@pytest.mark.parametrize(("num_stored", "num_prepared"), [(2000, 1024), (100, 100), (0, 0)])
def test_memory_is_made_ready_for_what_tiers_hold_up_to_a_gib(num_stored: int, num_prepared: int) -> None:
    rows, stack, keys = _Prepared(num_prepared), TierStack([DictTier()]), PrefixKeys(b"model", b"", 16)
    writer = BlockWriter(stack, keys, 8, 1 << 10)
    loader = BlockLoader(stack, writer, keys, rows, lambda n, size: np.empty((n, 8), np.uint8), num_stored)  # type: ignore[arg-type]
    assert num_prepared == 0 or rows.done.wait(600)
    assert loader.stop(600)
    assert writer.stop(600)
    assert rows.ids == list(range(num_prepared))
