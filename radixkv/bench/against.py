"""`radixkv bench against`: the same workloads by RadixKV and by a peer, in turns, each in its own process and environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from rich.console import Console
from rich.table import Table

from radixkv.bench import peer_process
from radixkv.bench.line_process import LineProcess
from radixkv.bench.machine import describe_machine
from radixkv.model.default_model import ensure_converted, find_default_model


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
    """A process that runs workloads one at a time; see `peer_process`."""

    def __init__(self, python: Path, engine: str, model: Path, options: dict[str, str | None]) -> None:
        self._process = LineProcess(
            engine, [str(python), peer_process.__file__, engine, str(model), json.dumps(options)]
        )
        started = self._process.reply()
        self.loaded: float = started["loaded"]
        self.ready: float = started["ready"]
        self.workloads: list[str] = started["workloads"]

    def run(self, workload: str) -> float:
        return float(self._process.ask(workload))

    def close(self) -> None:
        self._process.close()


def run_against(
    console: Console,
    peer: Literal["vllm", "llama.cpp"],
    peer_python: Path,
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
        dtype: of both, "float32" or "bfloat16"; llama.cpp computes as the default model's file is, which has 4 bits a weight.
        quantization: of our weights.

    Raises:
        RuntimeError: an engine's process has ended.
    """
    gguf = find_default_model()
    model = ensure_converted(gguf, console.print)
    with console.status(f"starting {peer}"):
        if peer == "vllm":
            theirs = _Engine(peer_python, peer, model, {"dtype": dtype})
        else:
            theirs = _Engine(peer_python, peer, gguf, {})
    ours = _Engine(Path(sys.executable), "radixkv", model, {"dtype": dtype, "quantization": quantization})
    try:
        rows = []
        for name in theirs.workloads:
            if only is None or only in name:
                with console.status(name):
                    rows.append(_measure(name, ours, theirs, rounds))
        document = {
            **describe_machine("torch", "radixkv"),
            "peer": peer,
            "dtype": dtype,
            "quantization": quantization,
            "loaded": {"ours": ours.loaded, "theirs": theirs.loaded},
            "ready": {"ours": ours.ready, "theirs": theirs.ready},
            "rows": [asdict(row) for row in rows],
        }
    finally:
        ours.close()
        theirs.close()
    precision = dtype if quantization is None else f"{dtype}, {quantization}"
    title = f"{document['cpu']}, {precision}"
    console.print(_table(f"{title}, seconds", peer, rows))
    console.print(
        f"from the start of the process until it can serve: {ours.loaded:.1f} s, {peer} {theirs.loaded:.1f} s; "
        f"until it has answered with 128 tokens: {ours.ready:.1f} s, {peer} {theirs.ready:.1f} s"
    )
    if plot_path is not None:
        plot_against(rows, peer, title, plot_path)
    if json_path is not None:
        json_path.write_text(json.dumps(document, indent=2) + "\n")


def _measure(name: str, ours: _Engine, theirs: _Engine, rounds: int) -> Row:
    pairs = [(ours.run(name), theirs.run(name)) for _ in range(rounds)]
    our_seconds, their_seconds = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return Row(name, our_seconds, their_seconds, median(our_seconds) / median(their_seconds))


def _table(title: str, peer: str, rows: list[Row]) -> Table:
    table = Table("workload", "RadixKV", peer, "ratio", title=title)
    for row in rows:
        style = "green" if row.ratio < 1 else "red"
        cells = (f"{median(row.ours):.2f}", f"{median(row.theirs):.2f}", f"[{style}]{row.ratio:.2f}[/]")
        table.add_row(row.name, *cells)
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
