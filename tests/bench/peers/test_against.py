"""`radixkv bench against`: rows, ratios, the file and the drawing, with engines whose times are known."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import radixkv
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.peers import against
from radixkv.bench.peers.against import make_one_layer, workload_names
from radixkv.bench.peers.engine_process import Requests, Steps
from radixkv.bench.peers.line_process import LineProcess
from radixkv.cli.main import app
from radixkv.model.default_model import find_default_model
from radixkv.model.gguf.conversion import ensure_converted


class Engine:
    """Takes 2 seconds for each workload if it is RadixKV, and 4, 5, 6, ... if it is the peer."""

    def __init__(self, python: Path, engine: str, kind: str, model: Path, options: dict[str, Any]) -> None:
        self.loaded, self.ready, self.version = 1.0, 3.0, f"version of {engine}"
        self._seconds = iter(range(4, 100)) if engine == "vllm" else None
        self.closed = False

    def run(self, workload: str) -> float:
        return 2.0 if self._seconds is None else float(next(self._seconds))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Stands for the interpreter of a peer's environment."""
    (tmp_path / "python").touch()
    return tmp_path / "python"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Gets the figures that are saved; no engine is started."""
    from matplotlib.figure import Figure

    figures: list[Any] = []
    save = Figure.savefig

    def watch(figure: Figure, *args: Any, **kwargs: Any) -> None:
        figures.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", watch)
    monkeypatch.setattr(against, "_Engine", Engine)
    monkeypatch.setattr(against, "ensure_converted", lambda gguf, progress: tmp_path)
    monkeypatch.setattr(against, "find_default_model", lambda: tmp_path / "model.gguf")
    return figures


def test_ratios_in_the_file_and_drawn(drawn: list[Any], python: Path, tmp_path: Path) -> None:
    file, plot = tmp_path / "against.json", tmp_path / "against.png"
    command = ["bench", "against", "--vllm", str(python), "--json", str(file), "--plot", str(plot), "--rounds", "3"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    written = json.loads(file.read_text())
    ratios = [2 / (5 + 3 * row) for row in range(9)]  # the medians of 4, 5, 6; of 7, 8, 9; ...
    assert [row["ratio"] for row in written["rows"]] == pytest.approx(ratios)
    assert written["machine"]["cpu"] == describe_machine()["cpu"]
    assert (written["peer"], written["peer_version"]) == ("vllm", "version of vllm")
    assert written["loaded"] == {"ours": 1.0, "theirs": 1.0}
    assert written["ready"] == {"ours": 3.0, "theirs": 3.0}
    assert plot.read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx(ratios)
    assert [label.get_text() for label in axes.get_yticklabels()] == workload_names("vllm", "end-to-end", None)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--vllm", "PYTHON", "--only", "embedding"], 1, "--only: no workload's name contains 'embedding'"),
        (["--llama-cpp", "PYTHON", "--only", "beam"], 1, "--only: no workload's name contains 'beam'"),
        (["--vllm", "PYTHON", "--quantization", "int5"], 2, "'int5' is not one of 'int8', 'int4'"),
        (["--vllm", "PYTHON", "--dtype", "float23"], 2, "'float23' is not one of 'bfloat16', 'float32'"),
    ],
)
def test_what_no_engine_can_do_is_refused_before_one_is_started(
    arguments: list[str], status: int, message: str, drawn: list[Any], python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM was started first, which takes minutes."""
    monkeypatch.setattr(against, "_Engine", None)
    monkeypatch.setenv("COLUMNS", "200")
    arguments = [str(python) if argument == "PYTHON" else argument for argument in arguments]
    result = CliRunner().invoke(app, ["bench", "against", *arguments])
    assert result.exit_code == status
    assert message in f"{result.output} {result.exception}"


def test_a_drawing_needs_a_known_ending(drawn: list[Any], python: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "against", "--vllm", str(python), "--plot", str(tmp_path / "a.nothing")])
    assert result.exit_code == 2
    assert not drawn


@pytest.mark.parametrize(("kind", "layers"), [("steps", 1), ("experts", 12)])
def test_models_that_are_made_for_it(
    kind: str, layers: int, drawn: list[Any], python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models of one layer, or of experts, without weights here."""
    started: list[tuple[str, str]] = []

    class Noted(Engine):
        def __init__(self, python: Path, engine: str, kind: str, model: Path, options: dict[str, Any]) -> None:
            super().__init__(python, engine, kind, model, options)
            started.append((engine, kind))
            assert json.loads((model / "config.json").read_text())["num_hidden_layers"] == layers

    monkeypatch.setattr(against, "Qwen3MoeForCausalLM", configuration_alone)
    monkeypatch.setattr(against, "_Engine", Noted)
    result = CliRunner().invoke(app, ["bench", "against", "--kind", kind, "--vllm", str(python)])
    assert result.exit_code == 0, result.output
    assert started == [("vllm", kind), ("radixkv", kind)]
    result = CliRunner().invoke(app, ["bench", "against", "--kind", kind, "--llama-cpp", str(python)])
    assert result.exit_code == 2
    assert "expected --vllm" in result.output


def configuration_alone(config: Any) -> Any:
    """Saves the configuration, and no weights."""
    return SimpleNamespace(save_pretrained=config.save_pretrained)


def test_the_model_of_one_layer_runs_all_its_sequences_in_one_step(tmp_path: Path) -> None:
    llm = radixkv.LLM(
        make_one_layer(tmp_path, ensure_converted(find_default_model(), print)), dtype="float32", max_num_seqs=256
    )
    steps: list[int] = []
    run = llm.engine.step
    llm.engine.step = lambda: steps.append(1) or run()  # type: ignore[method-assign]
    assert Steps(radixkv, llm).names()["256 sequences, top-p"]() != 0
    assert 2 + 66 <= len(steps) < 80  # a few more are of prompts


def test_a_schema_does_not_end_an_answer_early(tiny_model_folder: Path) -> None:
    """All engines generate the same number of tokens, whatever they are asked."""
    llm = radixkv.LLM(str(tiny_model_folder), dtype="float32", num_blocks=400)
    requests = Requests(radixkv, llm)
    generated: list[list[int]] = []
    generate = llm.generate

    def watch(*args: Any, **options: Any) -> list[Any]:
        outputs = generate(*args, **options)
        generated.append([len(output.outputs[0].token_ids) for output in outputs])
        return outputs

    llm.generate = watch  # type: ignore[method-assign]
    rows = requests.names()
    assert rows["the same, by a JSON schema"]() > 0
    assert rows["128 prompts of 100, 8 new"]() > 0
    assert generated == [[64] * 16, [8] * 128]


def test_why_an_engine_did_not_start_is_said() -> None:
    command = [
        sys.executable,
        "-S",
        "-c",
        "import sys; print('x' * 9999, file=sys.stderr); sys.exit('no such package')",
    ]
    process = LineProcess("vllm", command)
    for call in (process.reply, lambda: process.ask("work")):
        with pytest.raises(ChildProcessError, match=r"vllm: its process ended with status 1; .*: no such package$"):
            call()
    process.close()
