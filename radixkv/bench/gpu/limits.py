"""What this GPU can do at most: copying, reading, multiplying. The other GPU benches measure it before their own rows."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from radixkv.bench.gpu.report import GpuReport


def run_limits(console: Console, json_path: Path | None) -> None:
    """Measure, print, and write the machine and its limits.

    Raises:
        ValueError: there is no GPU.
    """
    report = GpuReport.begin(console, json_path, None)
    report.write()
    console.print(", ".join(f"{name} {value}" for name, value in report.machine.items()))
    console.print(report.limits.in_words())
