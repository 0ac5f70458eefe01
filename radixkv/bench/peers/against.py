"""`radixkv bench against`: the same workloads by RadixKV and by a peer, in turns, each in its own process and environment."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import radixkv
from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.common.tables import figure_table
from radixkv.bench.peers import engine_process
from radixkv.bench.peers.line_process import LineProcess
from radixkv.model.default_model import find_default_model
from radixkv.model.gguf.conversion import ensure_converted

Kind = Literal["end-to-end", "requests", "experts", "steps"]


@dataclass(frozen=True, slots=True)
class Row:
    """One workload's seconds, round by round.

    Attributes:
        ratio: our median over the peer's.
    """

    name: str
    ours: list[float]
    theirs: list[float]
    ratio: float


class _Engine:
    """A process that runs workloads one at a time; see `engine_process`."""

    def __init__(self, python: Path, engine: str, kind: Kind, model: Path, options: dict[str, str | None]) -> None:
        self._process = LineProcess(
            engine, [str(python), engine_process.__file__, engine, kind, str(model), json.dumps(options)]
        )
        started = self._process.reply()
        self.loaded: float = started["loaded"]
        self.ready: float = started["ready"]
        self.version: str = started["version"]

    def run(self, workload: str) -> float:
        return float(self._process.ask(workload))

    def close(self) -> None:
        self._process.close()


def run_against(
    console: Console,
    *,
    peer: Literal["vllm", "llama.cpp"],
    peer_python: Path,
    kind: Kind,
    dtype: str,
    quantization: str | None,
    rounds: int,
    only: str | None,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Measure, print a table, write the figures to ``json_path``, and draw the ratios into ``plot_path``.

    Args:
        peer_python: the interpreter of an environment in which the peer is installed: vLLM for CPUs, or llama.cpp as the
            package xllamacpp.
        kind: "end-to-end" on the default model; "requests", other kinds of requests to the same model; "experts", end to end
            on a mixture of experts with random weights; or "steps" on a model of one small layer, on one core.
        dtype: of both, "float32" or "bfloat16"; llama.cpp ignores it and runs the default model's file, of 4 bits a weight.
        quantization: of our weights.

    Raises:
        ChildProcessError: an engine's process has ended.
        ValueError: ``only`` names no workload.
    """
    names = workload_names(peer, kind, only)
    gguf = find_default_model()
    model = ensure_converted(gguf, console.print)
    with TemporaryDirectory() as folder, ExitStack() as engines:
        if kind == "steps":
            model = make_one_layer(Path(folder), model)
        elif kind == "experts":
            model = make_mixture(Path(folder), model)
        with console.status(f"starting {peer}"):
            if peer == "vllm":
                theirs = _Engine(peer_python, peer, kind, model, {"dtype": dtype})
            else:
                theirs = _Engine(peer_python, peer, kind, gguf, {})
            engines.callback(theirs.close)
        options = {"dtype": dtype, "quantization": quantization}
        ours = _Engine(Path(sys.executable), "radixkv", kind, model, options)
        engines.callback(ours.close)
        rows = []
        for name in names:
            with console.status(name):
                rows.append(_measure(name, ours, theirs, rounds))
        machine = describe_machine("torch", "radixkv")
        document = {
            "machine": machine,
            "peer": peer,
            "peer_version": theirs.version,
            "kind": kind,
            "dtype": dtype,
            "quantization": quantization,
            "loaded": {"ours": ours.loaded, "theirs": theirs.loaded},
            "ready": {"ours": ours.ready, "theirs": theirs.ready},
            "rows": [asdict(row) for row in rows],
        }
    precision = dtype if quantization is None else f"{dtype}, {quantization}"
    title = f"{machine['cpu']}, {precision}"
    if plot_path is not None:
        plot_against(rows, peer, title, plot_path)
    write_figures(json_path, document)
    console.print(_table(title, peer, rows))
    console.print(
        f"from the start of the process until it can serve: {ours.loaded:.1f} s, {peer} {theirs.loaded:.1f} s; "
        f"until it has run the first of these: {ours.ready:.1f} s, {peer} {theirs.ready:.1f} s"
    )


def workload_names(peer: Literal["vllm", "llama.cpp"], kind: Kind, only: str | None) -> list[str]:
    """Those that both engines can run and whose names contain ``only``; no engine is started for it.

    Raises:
        ValueError: there is none.
    """
    api: Any = radixkv if peer == "vllm" else SimpleNamespace()  # as `LlamaCpp`, without beam search
    names = [name for name in engine_process.KINDS[kind](api, None).names() if only is None or only in name]
    if not names:
        raise ValueError(f"--only: no workload's name contains {only!r}")
    return names


def make_one_layer(folder: Path, tokenizer: Path) -> Path:
    """Save a model so small that a step's time is the engine's own overhead.

    Args:
        tokenizer: a model's folder.

    Returns:
        ``folder``.
    """
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=1024,
    )  # fmt: skip
    return _save(LlamaForCausalLM(config), folder, tokenizer)


def make_mixture(folder: Path, tokenizer: Path) -> Path:
    """Save a mixture of experts as small as those that people run on a CPU: 535 million weights, 139 million per token.

    Args:
        tokenizer: a model's folder.

    Returns:
        ``folder``.
    """
    config = Qwen3MoeConfig(
        vocab_size=49152, hidden_size=1024, moe_intermediate_size=384, num_experts=32, num_experts_per_tok=4,
        num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=4, head_dim=64, max_position_embeddings=4096,
        tie_word_embeddings=True, norm_topk_prob=True, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    return _save(Qwen3MoeForCausalLM(config), folder, tokenizer)


def _save(model: PreTrainedModel, folder: Path, tokenizer: Path) -> Path:
    model.save_pretrained(folder)
    for file in tokenizer.glob("*token*.json"):
        shutil.copy(file, folder)
    return folder


def _measure(name: str, ours: _Engine, theirs: _Engine, rounds: int) -> Row:
    pairs = [(ours.run(name), theirs.run(name)) for _ in range(rounds)]
    our_seconds, their_seconds = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return Row(name, our_seconds, their_seconds, median(our_seconds) / median(their_seconds))


def _table(title: str, peer: str, rows: list[Row]) -> Table:
    table = figure_table("workload", "RadixKV, ms", f"{peer}, ms", "ratio", title=title)
    for row in rows:
        style = "green" if row.ratio < 1 else "red"
        ours, theirs = (f"{1000 * median(seconds):,.1f}" for seconds in (row.ours, row.theirs))
        table.add_row(row.name, ours, theirs, Text(f"{row.ratio:.2f}", style))
    return table


def plot_against(rows: Sequence[Row], peer: str, title: str, path: Path) -> None:
    """Draw each workload's ratio as a bar, into an image file; at 1 both take the same time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.45 * len(rows) + 1.4), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([row.name for row in rows], [row.ratio for row in rows], color="#00897b")
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel(f"RadixKV's seconds / {peer}'s")
    axes.set_title(title)
    figure.savefig(path, dpi=120)
