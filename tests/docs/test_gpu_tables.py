"""Tables of what was measured on GPUs are those of the JSON files of their first light, to the last digit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.committed_figures import MEASURED_GPU, ROOT, gpu_rows, table

GPUS = ("h200", "h100")
# Rows that multiply; what they read is nothing beside it.
MULTIPLIED = ("prefill", "the same, torch's sdpa")


def gpu_layer() -> str:
    measured = [gpu_rows(gpu) for gpu in GPUS]
    rows = [
        (
            name,
            f"{row['bytes'] / 1e6:,.0f}",
            *(
                figure
                for each in measured
                for figure in (
                    f"{each[name]['median_us']:,.0f}",
                    f"{each[name]['bytes'] / each[name]['median_us'] * 1e6 / each[name]['read_bytes_per_s']:.2f}",
                )
            ),
        )
        for name, row in measured[0].items()
        if "ratio" in row and not name.startswith(MULTIPLIED)
    ]
    return table(("one layer", "MB", "H200, us", "of reading", "H100, us", "of reading"), rows)


def gpu_prompts() -> str:
    measured = [gpu_rows(gpu) for gpu in GPUS]
    rows = [
        (
            name,
            *(
                figure
                for each in measured
                for figure in (f"{each[name]['median_us']:,.0f}", f"{each[name]['ratio']:.2f}")
            ),
        )
        for name in measured[0]
        if name.startswith(MULTIPLIED)
    ]
    return table(("one layer", "H200, us", "of a product", "H100, us", "of a product"), rows)


def gpu_steps() -> str:
    rows = []
    for gpu in GPUS:
        for shared, name in ((0, "nothing"), (3500, "3,500 tokens")):
            prefix = f"default: 64 x 4,096, {shared:,} shared"
            step, drawn, answers = (gpu_rows(gpu)[f"{prefix}, {what}"] for what in ("step", "top-p step", "answers"))
            floor_us = step["bytes"] / step["read_bytes_per_s"] * 1e6
            rows.append(
                (
                    f"{gpu.upper()}: {name}",
                    f"{step['bytes'] / 1e9:.1f}",
                    f"{floor_us / 1e3:.1f}",
                    f"{step['median_us'] / 1e3:.1f}",
                    f"{step['median_us'] / floor_us:.2f}",
                    f"{drawn['median_us'] / 1e3:.1f}",
                    f"{step['tokens_per_s']:,.0f}",
                    f"{answers['seconds']:.1f}",
                )
            )
    header = (
        "64 sequences of 4,096 share",
        "GB",
        "floor, ms",
        "step, ms",
        "step / floor",
        "with top-p, ms",
        "tokens/s",
        "answers, s",
    )
    return table(header, rows)


def gpu_drafts() -> str:
    drafted = [(name, row) for name, row in gpu_rows("h200").items() if name.startswith("drafts: ")]
    rows = [
        (
            name.removeprefix("drafts: 64 x 4,096, 3,500 shared, ").removesuffix(", step"),
            f"{row['median_us'] / 1e3:.1f}",
            f"{row['tokens_per_step']:.1f}",
            f"{row['tokens_per_s']:,.0f}",
        )
        for name, row in drafted
    ]
    return table(("64 sequences of 4,096 that share 3,500", "step, ms", "tokens a step", "tokens/s"), rows)


@pytest.mark.parametrize(
    ("path", "expected"),
    [(MEASURED_GPU, each) for each in (gpu_layer, gpu_prompts, gpu_drafts, gpu_steps)],
    ids=lambda value: value.name if isinstance(value, Path) else value.__name__,
)
def test_a_table_is_what_was_measured(path: Path, expected: Callable[[], str]) -> None:
    assert expected() in path.read_text(), f"{path.relative_to(ROOT)} should have\n\n{expected()}"
