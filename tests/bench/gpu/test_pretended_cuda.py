"""What a first light runs, as far as a CPU can run it: tensors on "cuda" lie on the CPU, and no launch reaches a GPU.

Everything up to there is real: command lines, batches, plans, work items, the launchers' checks, files, and what follows from
the rows. Times are all the same, and mean nothing.
"""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from support.compiled_kernels import pretended_gpu
from support.model_zoo import VOCAB_SIZE, build
from support.preloaded_process import run_preloaded
from support.tensors_on_cpu import OnCpu
from torch.autograd import DeviceType
from triton.runtime.jit import JITFunction
from typer.testing import CliRunner

from radixkv.bench.gpu import attention, decode, layer, tiles, timing
from radixkv.bench.gpu.first_light_parts import first_light_parts
from radixkv.bench.gpu.report import GpuReport
from radixkv.bench.gpu.targets import PREFILL_PEERS, next_steps
from radixkv.cli.bench import app
from radixkv.memory import KVPool

SECONDS = 0.001


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Pretended CUDA; the names of the kernels that were launched on it."""
    launched: list[str] = []

    def run(kernel: JITFunction, *args: object, **options: object) -> None:
        launched.append(kernel.fn.__name__)

    def seconds_of(work: Callable[[], object]) -> float:
        work()
        return SECONDS

    def small_pool(num_blocks: int, dtype: torch.dtype, device: str, num_layers: int = 1) -> KVPool:
        return layer.make_pool(2, dtype, "cpu", num_layers)

    def drawn(*size: Any, device: Any = None, randn: Any = torch.randn, **options: Any) -> torch.Tensor:
        """Zeros where kernels would read, since none does."""
        return (torch.zeros if device == "cuda" else randn)(*size, device=device, **options)

    properties = SimpleNamespace(multi_processor_count=132, total_memory=80 * 2**30)
    for name, value in {
        "is_available": True,
        "get_device_name": "pretended",
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "empty_cache": None,
        "synchronize": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    monkeypatch.setattr(torch, "randn", drawn)
    for module in (timing, attention, tiles):
        monkeypatch.setattr(module, "median_seconds", seconds_of)
    for module in (attention, tiles):
        monkeypatch.setattr(module, "make_pool", small_pool)
    for module, name, size in (
        (timing, "_COPIED_BYTES", 4096),
        (timing, "_MATRIX_SIZE", 64),
        (attention, "BLOCKS", 16),
        (attention, "PREFILLS", 2),
        (attention, "NEW", 64),
        (attention, "CACHED", 128),
    ):
        monkeypatch.setattr(module, name, size)
    with pretended_gpu(run), OnCpu():
        yield launched


def run_part(name: str, path: Path) -> dict[str, Any]:
    """The file that a part writes, run in this process."""
    (part,) = (part for part in first_light_parts() if part.name == name)
    command = part.command[1:]
    assert command[:3] == ["-m", "radixkv", "bench"]
    CliRunner().invoke(
        app, [str(path) if argument == "{json}" else argument for argument in command[3:]], catch_exceptions=False
    )
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def test_limits_are_computed_from_bytes_and_seconds(launches: list[str], tmp_path: Path) -> None:
    report = run_part("limits", tmp_path / "limits.json")
    assert report["machine"]["gpu"] == "pretended"
    assert report["machine"]["capability"] == "9.0"
    assert report["limits"] == {
        "bytes_per_s": 2 * 4096 / SECONDS,
        "read_bytes_per_s": 4096 / SECONDS,
        "bf16_flops": 2 * 64**3 / SECONDS,
    }


def test_the_attention_bench_has_all_rows_and_names_next_steps(launches: list[str], tmp_path: Path) -> None:
    report = run_part("attention", tmp_path / "attention.json")
    assert not report["failed"]
    # There is no cuDNN on a CPU, which is no failure.
    assert list(report["unavailable"]) == [PREFILL_PEERS[1]]
    assert {"_attend_items", "_attend_split", "_merge", "_write_cache", "_copy_blocks"} <= set(launches)
    by_name = {row["name"]: row for row in report["rows"]}
    for name in (attention.FLAT, attention.SHARED):
        assert by_name[f"{name}, 8 layers"]["median_us"] == pytest.approx(SECONDS * 1e6 / 8)
        assert by_name[f"{name}, 8 layers"]["bytes"] == by_name[name]["bytes"]
    steps = "\n".join(next_steps({"attention": report}))
    for name in (*attention.IN_GRAPHS, attention.LEVELS):
        if name != "flat 8 x 16,384":
            assert f": {name}: " in steps
            assert f": {name}, as graphs decode: " in steps


@pytest.mark.parametrize(("part", "expected"), [("tiles-sharing", 32), ("tiles-classes", 4), ("tiles-splitting", 18)])
def test_every_part_of_the_tile_bench_runs_and_resumes(
    part: str, expected: int, launches: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "tiles.json"
    report = run_part(part, path)
    assert not report["failed"]
    assert len(report["rows"]) == expected
    assert any(
        line.split()[0] in ("MIN_SAVED_BYTES", "one_class", "MIN_PIECE_KEYS") for line in next_steps({"tiles": report})
    )
    # Cut short after some rows, it goes on.
    path.write_text(json.dumps({**report, "rows": report["rows"][:-2]}))
    launches.clear()
    again = run_part(part, path)
    assert [row["name"] for row in again["rows"]] == [row["name"] for row in report["rows"]]
    assert 0 < len(launches) <= 2 * 8
    path.write_text(json.dumps({**report, "machine": {"gpu": "another"}}))
    with pytest.raises(ValueError, match="was measured on another, not pretended"):
        run_part(part, path)


@pytest.mark.parametrize("run", [attention.run_attention, tiles.run_tiles])
def test_a_word_that_names_no_row_is_refused(run: Callable[..., bool], launches: list[str]) -> None:
    """One layer's attention and whole steps succeeded, with an empty table."""
    with pytest.raises(ValueError, match=r"^--only: no row's name contains 'flat 257'"):
        run(Console(quiet=True), None, "flat 257")
    assert not launches


def test_tiles_that_fail_are_named_at_the_end(
    launches: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were noted among hundreds of lines, and the command succeeded."""

    def fail(levels: object, one_class: bool) -> tiles.Timed:
        if one_class:
            raise RuntimeError("no such tile")
        return tiles.Timed(1.0)

    monkeypatch.setattr(tiles, "_placed", fail)
    (name, _) = tiles.SHARED_TREES
    assert not tiles.run_tiles(Console(width=200), None, name)
    assert capsys.readouterr().out.splitlines()[-1] == f"failed: {name}, one: RuntimeError: no such tile"


def test_every_tile_class_has_candidates_of_its_own(launches: list[str], tmp_path: Path) -> None:
    report = run_part("tiles-64", tmp_path / "tiles.json")
    assert not report["failed"]
    assert {row["name"].split(":")[0] for row in report["rows"]} == {"64 rows"}
    assert len(report["rows"]) > 10


def test_one_configuration_of_a_tile_class_is_found_by_its_name(
    launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it stands in the file, to measure it again; nothing is prepared for the other kinds of work."""
    name = "16 rows: 256 tails of 608: TileConfig(keys=64, warps=4, stages=2)"
    prepared: list[int] = []
    make_pool = tiles.make_pool
    monkeypatch.setattr(tiles, "make_pool", lambda *args: (prepared.append(1), make_pool(*args))[1])
    report = GpuReport(Console(quiet=True), None, {}, timing.Limits(1, 1, 1), name)
    (table,) = tiles._tile_tables(report)
    assert [row["name"] for row in report._rows] == [name]
    assert table.row_count == len(prepared) == 1


def test_the_decode_bench_has_all_rows_and_names_next_steps(
    launches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the engine's CPU path, with a model that is small."""

    def make_prompts(shared: int, own: int) -> list[list[int]]:
        return [[*range(3, 3 + shared), *(3 + (7 * i + j) % (VOCAB_SIZE - 3) for j in range(own))] for i in range(3)]

    def generate_batch(**options: Any) -> dict[str, Any]:
        answer = SimpleNamespace(generated_tokens=[7] * 4, created_time=0.0, lifespan=(0.5, 1.0))
        return dict.fromkeys("abc", answer)

    def kernel(index: int) -> SimpleNamespace:
        return SimpleNamespace(
            device_type=DeviceType.CUDA, time_range=SimpleNamespace(start=index * 1e3, end=index * 1e3 + 999)
        )

    model = build("llama", {"max_position_embeddings": 8192})
    model.generate_batch = generate_batch
    for name, value in {
        "BATCH": 3,
        "LENGTH": 40,
        "SHARED": 24,
        "NEW_TOKENS": 4,
        "WARM_UP_STEPS": 1,
        "TIMED_STEPS": 6,
        "PROFILED_STEPS": 1,
        "make_model": lambda: copy.deepcopy(model),
        "make_prompts": make_prompts,
        "profile": lambda activities: nullcontext(SimpleNamespace(events=lambda: [kernel(i) for i in range(3)])),
        "GREEDY": decode.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
    }.items():
        monkeypatch.setattr(decode, name, value)
    report = run_part("decode-neither", tmp_path / "decode.json")
    assert not report["failed"]
    transformers = run_part("decode-transformers", tmp_path / "transformers.json")
    drafts = run_part("decode-drafts", tmp_path / "drafts.json")
    assert not drafts["failed"]
    # Forced drafts arrive: one token per step without drafts, and more the more of the four are right.
    tokens = [row["tokens_per_step"] for row in drafts["rows"]]
    assert [row["drafts"] for row in drafts["rows"]] == [0, 4, 4, 4]
    assert tokens[:2] == [1.0, 1.0]
    assert 1.0 < tokens[2] < tokens[3] <= 5.0
    steps = "\n".join(next_steps({"decode": report, "transformers": transformers, "drafts": drafts}))
    assert steps.count(" x one without, expected 1.15") == 3
    for shared in (0, 24):
        for what in ("step: ", "top-p step: ", "step, GPU idle: ", "answers: "):
            assert f"3 x 40, {shared} shared, {what}" in steps


def test_the_bfloat16_model_is_judged_on_a_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests themselves, much smaller and over the CPU's backend: a GPU's first run must not fail because of the test."""
    path = Path(__file__).parents[2] / "engine" / "test_bfloat16_on_gpu.py"
    spec = importlib.util.spec_from_file_location("judged", path)
    assert spec is not None
    assert spec.loader is not None
    judged = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(judged)
    for name, value in {
        "DEVICE": "cpu",
        "POOL_BYTES": 2**22,
        "HEADS": 8,
        "KV_HEADS": 2,
        "HEAD_DIM": 16,
        "ROOT": 40,
        "NODES": 2,
        "NODE": 20,
        "OWN": (2, 7),
        "NEW": 3,
        "COUNT": 4,
    }.items():
        monkeypatch.setattr(judged, name, value)
    model = judged.make_model()
    judge = judged.Judge(model)
    judged.test_greedy_answers_are_as_good_as_transformers(model, judge, {})
    judged.test_log_probabilities_are_as_good_as_transformers(model, judge, eager=True)
    # And worse answers are noticed: those of a model with other weights.
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.1)
    with pytest.raises(AssertionError):
        judged.test_greedy_answers_are_as_good_as_transformers(model, judge, {})


@pytest.mark.slow
def test_the_engine_tests_are_themselves_right() -> None:
    """Two of those that a first light runs, fixtures included, over the CPU's backend."""
    path, chosen = Path(__file__).parents[2] / "engine" / "test_on_gpu.py", "qwen3_moe or come_up_again"
    options = ["-p", "support.gpu_tests_on_cpu", "-p", "no:cacheprovider", "-k", chosen]
    # Without the module, tests prepare no processes: a preloaded one cannot.
    program = "import sys, pytest; del sys.modules['support.preloaded_process']; sys.exit(pytest.main(sys.argv[1:]))"
    result = run_preloaded(program, *options, str(path))
    assert result.returncode == 0, result.stdout
    assert "2 passed" in result.stdout
