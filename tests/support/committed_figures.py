"""The benches' committed figures, and the pages that quote them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "radixkv" / "bench" / "results"
BENCHMARKS = ROOT / "docs" / "benchmarks" / "index.md"
CPU = ROOT / "docs" / "benchmarks" / "cpu.md"
README = ROOT / "README.md"
INDEX = ROOT / "docs" / "index.md"
CLUSTER = ROOT / "docs" / "cluster.md"
DRAFTS = ROOT / "docs" / "drafts.md"
TIERS = ROOT / "docs" / "tiers.md"
MEASURED_CLUSTER = ROOT / "docs" / "benchmarks" / "cluster.md"
MEASURED_GPU = ROOT / "docs" / "benchmarks" / "gpu.md"
MEASURED_DRAFTS = ROOT / "docs" / "benchmarks" / "drafts.md"
MEASURED_SERVER = ROOT / "docs" / "benchmarks" / "server.md"
MEASURED_TIERS = ROOT / "docs" / "benchmarks" / "tiers.md"


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; what follows the first column is aligned to the right."""
    header = list(header)
    lines = [f"| {' | '.join(line)} |" for line in (header, *rows)]
    return "\n".join([lines[0], f"|---|{'---:|' * (len(header) - 1)}", *lines[1:]])


def gpu_rows(gpu: str) -> dict[str, dict[str, Any]]:
    """Rows of all parts of a first light, each with the limits that its part measured."""
    reports = (part.get("report", {}) for part in results(f"first-light-{gpu}")["parts"].values())
    return {row["name"]: row | report["limits"] for report in reports for row in report.get("rows", ())}
