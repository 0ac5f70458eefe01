"""What the GPU benches measure is what they say; the measuring itself needs a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table
from support.model_zoo import build_supported
from torch.autograd import DeviceType

from radixkv.attention.batch_tables import common_blocks
from radixkv.bench.gpu import decode
from radixkv.bench.gpu.attention import run_attention
from radixkv.bench.gpu.decode import busy_seconds, run_decode, split_linears
from radixkv.bench.gpu.layer import BLOCK_SIZE, Level, make_pool, max_tokens, tree_batch
from radixkv.bench.gpu.report import GpuReport
from radixkv.bench.gpu.tiles import run_tiles
from radixkv.bench.gpu.timing import Limits
from radixkv.memory.fp8_kv_pool import FP8
from radixkv.model.replacement.merged_linear import MergedLinear, merge_linears


def test_a_tree_shares_what_its_levels_say() -> None:
    batch, num_blocks, tokens = tree_batch(8, [Level(1, 64), Level(2, 48), Level(8, 30)], 1)
    assert tokens == 64 + 2 * 48 + 8 * 30 + 8
    ids = {block for table in batch.tables for block in table.block_ids.tolist()}
    assert len(ids) == num_blocks == max(ids) + 1
    first, *others = (table.block_ids for table in batch.tables)
    shared = [common_blocks(first, other) * BLOCK_SIZE for other in others]
    assert shared == [64 + 48] * 3 + [64] * 4
    assert batch.num_context.tolist() == [64 + 48 + 30] * 8
    assert batch.num_new.tolist() == [1] * 8
    assert all(len(table.block_ids) * BLOCK_SIZE > 142 for table in batch.tables)
    assert max_tokens(batch) == len(first) * BLOCK_SIZE


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


def test_a_profile_without_kernels_is_no_idle_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(decode, "profile", lambda activities: nullcontext(SimpleNamespace(events=list)))
    llm: Any = SimpleNamespace(engine=SimpleNamespace(step=lambda: []))
    with pytest.raises(RuntimeError, match="saw no kernel"):
        decode.measure_idle(llm)


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # without biases, and with
def test_linear_layers_are_split_again(name: str) -> None:
    model, tokens = build_supported(name), torch.arange(3, 40).unsqueeze(0)
    names = dict(model.named_parameters()).keys()
    with torch.inference_mode():
        before = model(input_ids=tokens, use_cache=False).logits
        assert merge_linears(model, lambda: model(input_ids=tokens, use_cache=False))
        split_linears(model)
        assert not any(isinstance(module, MergedLinear) for module in model.modules())
        assert dict(model.named_parameters()).keys() == names
        torch.testing.assert_close(model(input_ids=tokens, use_cache=False).logits, before, rtol=1e-4, atol=1e-4)


def test_transformers_time_is_that_of_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of what it sets up anew for each call."""
    monkeypatch.setattr(decode, "BATCH", 2)
    tokens = [7] * decode.NEW_TOKENS
    outputs = {
        "a": SimpleNamespace(generated_tokens=tokens, created_time=10.0, lifespan=(10.5, 12.0)),
        "b": SimpleNamespace(generated_tokens=tokens, created_time=10.25, lifespan=(11.0, 14.0)),
    }
    model = SimpleNamespace(generate_batch=lambda **options: outputs)
    assert decode.answer_all_with_transformers(model, 0) == decode.Answers(4.0, 2 * decode.NEW_TOKENS / 4.0)
    outputs["b"].generated_tokens = tokens[1:]
    with pytest.raises(RuntimeError, match="1 complete answers of 2"):
        decode.answer_all_with_transformers(model, 0)


def test_what_fails_with_nothing_shared_is_measured_with_much_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_alone(llm: object, shared: int) -> None:
        if shared == 0:
            raise RuntimeError("no kernel for that")

    @contextmanager
    def decoding(llm: object, shared: int, params: object) -> Iterator[None]:
        fails_alone(llm, shared)
        yield

    def answers(llm: object, shared: int) -> decode.Answers:
        fails_alone(llm, shared)
        return decode.Answers(1.0, 2.0)

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(decode, "warm_up", fails_alone)
    monkeypatch.setattr(decode, "decoding", decoding)
    monkeypatch.setattr(decode, "LLM", lambda model, **options: None)
    monkeypatch.setattr(decode, "measure_steps", lambda llm, shared, bytes_per_s: decode.Step(1, 1.0, 2.0, 3.0))
    monkeypatch.setattr(decode, "measure_idle", lambda llm: decode.Idle(0.1, 0.1))
    monkeypatch.setattr(decode, "answer_all", answers)
    report = GpuReport(Console(), None, {}, Limits(1.0, 1.5, 2.0))
    table = Table(*"abcdefg")
    decode.measure_engine(report, table, None, "kind", {})
    alone, shared = "kind: 64 x 4,096, 0 shared", "kind: 64 x 4,096, 3,500 shared"
    assert list(report.failed) == [
        "kind: warm-up, 0 shared",
        *(f"{alone}, {part}" for part in ("step", "top-p step", "answers")),
    ]
    assert [str(cell) for cell in table.columns[0].cells] == [shared, f"{shared}, top-p", f"{shared}, answers"]
    # What was lost when the process was killed is measured when it goes on; nothing is there twice.
    report._rows[:] = [row for row in report._rows if not row["name"].endswith("idle")]
    decode.measure_engine(report, table, None, "kind", {})
    names = [row["name"] for row in report._rows]
    assert f"{shared}, step, GPU idle" in names
    assert len(names) == len(set(names))


@dataclass(frozen=True)
class Figure:
    us: float


def test_a_row_that_fails_is_noted_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    path = tmp_path / "rows.json"
    report = GpuReport(Console(), path, {"gpu": "none"}, Limits(1.0, 1.5, 2.0), only="row")

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
