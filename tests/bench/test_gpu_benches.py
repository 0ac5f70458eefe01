"""What the GPU benches measure is what they say; the measuring itself needs a GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch.autograd import DeviceType

from radixkv.attention.plan import common_blocks
from radixkv.bench.attention import BLOCK_SIZE, Level, make_pool, run_attention, tree_chunks
from radixkv.bench.decode import busy_seconds, run_decode
from radixkv.bench.gpu_report import GpuReport
from radixkv.bench.gpu_timing import Limits
from radixkv.bench.tiles import run_tiles
from radixkv.memory.fp8_kv_pool import FP8


def test_a_tree_shares_what_its_levels_say() -> None:
    chunks, num_blocks, tokens = tree_chunks(8, [Level(1, 64), Level(2, 48), Level(8, 30)], 1)
    assert tokens == 64 + 2 * 48 + 8 * 30 + 8
    ids = {block for chunk in chunks for block in chunk.block_ids.tolist()}
    assert len(ids) == num_blocks == max(ids) + 1
    shared = [common_blocks(chunks[0].block_ids, other.block_ids) * BLOCK_SIZE for other in chunks[1:]]
    assert shared == [64 + 48] * 3 + [64] * 4
    assert all(chunk.num_context == 64 + 48 + 30 and len(chunk.block_ids) * BLOCK_SIZE > 142 for chunk in chunks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_a_pool_stores_what_a_rows_floor_counts(dtype: torch.dtype) -> None:
    pool = make_pool(3, dtype, "cpu")
    assert pool.dtype == dtype
    assert sum(tensor.nbytes for tensor in (*pool.keys, *pool.values)) == 3 * BLOCK_SIZE * 2 * 8 * 128 * dtype.itemsize
    assert pool.nbytes == 3 * pool.block_nbytes == 3 * BLOCK_SIZE * 2 * 8 * 128 * dtype.itemsize
    assert [scale is None for scale in pool.scales(0)] == [dtype != FP8] * 2
    for tensor in (*pool.keys, *pool.values):
        assert tensor.float().std() == pytest.approx(1, rel=0.1)


def test_busy_time_counts_overlapping_work_once() -> None:
    def event(start: float, end: float, device: DeviceType = DeviceType.CUDA) -> SimpleNamespace:
        return SimpleNamespace(device_type=device, time_range=SimpleNamespace(start=start, end=end))

    events = [event(0, 10), event(5, 12), event(20, 30), event(22, 25), event(0, 100, DeviceType.CPU)]
    assert busy_seconds(events) == pytest.approx(22e-6)
    assert busy_seconds(events, 7.9) == pytest.approx(22e-6)
    assert busy_seconds(events, 8.0) == pytest.approx(30e-6)


@dataclass(frozen=True)
class Figure:
    us: float


def test_a_row_that_fails_is_noted_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    path = tmp_path / "rows.json"
    report = GpuReport(Console(), path, {"gpu": "none"}, Limits(1.0, 2.0), only="row")

    def fail() -> Figure:
        raise MemoryError("too small")

    assert report.measure("row 1", lambda: Figure(3.0)) == Figure(3.0)
    assert report.measure("row 2", fail) is None
    # Written by now: what comes after may take the process with it.
    written = json.loads(path.read_text())
    assert written["rows"] == [{"name": "row 1", "us": 3.0}]
    assert written["failed"] == report.failed == {"row 2": "MemoryError: too small"}
    assert report.measure("row 3", lambda: Figure(4.0)) == Figure(4.0)
    assert report.measure("another", fail) is None
    assert [row["name"] for row in json.loads(path.read_text())["rows"]] == ["row 1", "row 3"]
    assert set(report.failed) == {"row 2"}
    assert "row 2 failed: MemoryError: too small" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_without_a_gpu_they_say_so() -> None:
    for run in (run_attention, run_decode, run_tiles):
        with pytest.raises(ValueError, match="there is no CUDA device here"):
            run(Console(), None)
