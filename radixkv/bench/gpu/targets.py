"""The targets of the GPU benches, and what follows from their rows.

Times are those of an H200, which reads 4.46 TB/s; for another GPU they are scaled by its read bandwidth. Nothing here needs
torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

# Names of rows, which `radixkv.bench.gpu.attention` and `radixkv.bench.gpu.decode` measure.
FLAT = "flat 256 x 4,096"
SHARED = "256 x 4,096, 3,500 shared"
LEVELS = "256: 2,048 by all, 1,792 by 32 each, 256 private"
AS_GRAPHS = ", as graphs decode"
PREFILL = "prefill 4 x 2,048 over 6,144"
PREFILL_PEERS = (
    "the same, torch's sdpa with FLASH_ATTENTION",
    "the same, torch's sdpa with CUDNN_ATTENTION, in two calls that nothing merges",
)

_H200_READ_BYTES_PER_S = 4.46e12
_MIN_RATIOS = MappingProxyType({FLAT: 0.9, f"{FLAT}{AS_GRAPHS}": 0.9})
_MAX_US_ON_H200 = MappingProxyType(
    {name + suffix: limit for name, limit in ((SHARED, 190.0), (LEVELS, 110.0)) for suffix in ("", AS_GRAPHS)}
)
_MAX_STEP_RATIO = 1.15
_MAX_IDLE = 0.03
# Time of a step with drafts over that of a step without.
_MAX_DRAFTED_RATIO = 1.15
# A tile configuration is called faster where it saves more than this share of the time.
_MIN_GAIN = 0.02

Report = Mapping[str, Any]
Rows = dict[str, dict[str, Any]]


def next_steps(reports: Mapping[str, Report]) -> list[str]:
    """What to do next, by what was found.

    Args:
        reports: contents of the files of `GpuReport`s, under any keys; empty: none was written.
    """
    measured = [report for report in reports.values() if report]
    gpus = sorted({report["machine"]["gpu"] for report in measured})
    lines = [f"figures of different GPUs are mixed: {', '.join(gpus)}"] if len(gpus) > 1 else []
    for report in measured:
        lines += (f"row failed: {name}: {error}" for name, error in report["failed"].items())
        lines += (f"unavailable: {name}: {why}" for name, why in report.get("unavailable", {}).items())
    rows: Rows = {row["name"]: row for report in measured for row in report["rows"]}
    read_bytes_per_s = measured[0]["limits"]["read_bytes_per_s"] if measured else _H200_READ_BYTES_PER_S
    lines += _attention(rows, read_bytes_per_s)
    lines += _decoding(rows)
    lines += _drafting(rows)
    lines += _tiles(rows)
    lines += _sharing(rows)
    lines += _tile_classes(rows)
    lines += _splitting(rows)
    return lines


def _attention(rows: Rows, read_bytes_per_s: float) -> Iterator[str]:
    for name, least in _MIN_RATIOS.items():
        if name in rows:
            ratio = rows[name]["ratio"]
            yield f"{_verdict(ratio >= least)}: {name}: {ratio:.2f} of what reading reaches, expected {least}"
    for name, limit in _MAX_US_ON_H200.items():
        if name in rows:
            taken, limit = rows[name]["median_us"], limit * _H200_READ_BYTES_PER_S / read_bytes_per_s
            yield f"{_verdict(taken <= limit)}: {name}: {taken:.0f} us, expected {limit:.0f}"
    if PREFILL in rows:
        taken = rows[PREFILL]["median_us"]
        for peer in PREFILL_PEERS:
            if peer in rows:
                theirs = rows[peer]["median_us"]
                yield f"{_verdict(taken <= theirs)}: {PREFILL}: {taken:.0f} us, {peer}: {theirs:.0f} us"


def _decoding(rows: Rows) -> Iterator[str]:
    for name, row in rows.items():
        if name.endswith("step") and "floor_us" in row:
            ratio = row["median_us"] / row["floor_us"]
            met = _verdict(ratio <= _MAX_STEP_RATIO)
            yield f"{met}: {name}: {ratio:.2f} x what must be read, expected {_MAX_STEP_RATIO}"
        elif "between_steps" in row:
            idle = row["between_steps"]
            yield f"{_verdict(idle < _MAX_IDLE)}: {name}: {idle:.1%} between steps, expected below {_MAX_IDLE:.0%}"
        elif name.endswith("answers") and not name.startswith("transformers"):
            theirs = rows.get(f"transformers: {name.split(': ', 1)[1]}")
            if theirs is not None:
                ours, others = row["tokens_per_s"], theirs["tokens_per_s"]
                yield f"{_verdict(ours > others)}: {name}: {ours:,.0f} tokens/s, transformers {others:,.0f}"


def _drafting(rows: Rows) -> Iterator[str]:
    for name, row in rows.items():
        match = re.fullmatch(r"(drafts: .+), \d+ drafts each, .+ right, step", name)
        without = rows.get(f"{match[1]}, no drafts, step") if match else None
        if without is not None:
            ratio = row["median_us"] / without["median_us"]
            met = _verdict(ratio <= _MAX_DRAFTED_RATIO)
            yield f"{met}: {name}: {ratio:.2f} x one without, expected {_MAX_DRAFTED_RATIO}"


def _tiles(rows: Rows) -> Iterator[str]:
    """For every kind of work, a configuration faster than the one in use, which is the first that was measured."""
    kinds: dict[str, list[tuple[str, float]]] = {}
    for name, row in rows.items():
        kind, found, config = name.partition(": TileConfig")
        if found:
            kinds.setdefault(kind, []).append((f"TileConfig{config}", row["median_us"]))
    for kind, times in kinds.items():
        (used, used_us), (best, best_us) = times[0], min(times, key=lambda item: item[1])
        if best_us < (1 - _MIN_GAIN) * used_us:
            yield f"tile_config: {kind}: {best} takes {best_us:.1f} us, {used}, in use, {used_us:.1f}"


def _sharing(rows: Rows) -> Iterator[str]:
    saved = []
    for name, alone in rows.items():
        match = re.fullmatch(r"sharing: ([\d,]+) tokens by (\d+), alone", name)
        together = rows.get(name.replace(", alone", ", together"))
        if match and together:
            tokens, count = (int(number.replace(",", "")) for number in match.groups())
            saved.append(((count - 1) * tokens, together["median_us"] < alone["median_us"]))
    if saved:
        yield _threshold("MIN_SAVED_BYTES in triton.cost_model: sharing", "tokens saved", saved)


def _tile_classes(rows: Rows) -> Iterator[str]:
    for name, row in rows.items():
        tree = re.fullmatch(r"(tile classes: .+), one", name)
        in_turn = rows.get(f"{tree[1]}, several in turn") if tree else None
        if tree and in_turn:
            yield (
                f"one_class in triton.backend: {tree[1]}: {row['median_us']:.1f} us with one, "
                f"{in_turn['median_us']:.1f} with several in turn"
            )


def _threshold(what: str, unit: str, outcomes: Sequence[tuple[int, bool]]) -> str:
    losing = max((amount for amount, pays in outcomes if not pays), default=None)
    winning = min((amount for amount, pays in outcomes if pays and (losing is None or amount > losing)), default=None)
    if winning is None:
        return f"{what} paid nowhere above {losing:,} {unit}"
    return f"{what} always pays from {winning:,} {unit} on" + ("" if losing is None else f", and not at {losing:,}")


def _splitting(rows: Rows) -> Iterator[str]:
    batches: dict[str, dict[int, float]] = {}
    for name, row in rows.items():
        match = re.fullmatch(r"splitting: (.+) in (\d+)", name)
        if match:
            batches.setdefault(match[1], {})[int(match[2])] = row["median_us"]
    for batch, times in batches.items():
        best = min(times, key=lambda splits: times[splits])
        yield f"MIN_PIECE_KEYS in triton.cost_model: {batch} is fastest in {best} pieces, {times[best]:.1f} us"


def _verdict(met: bool) -> str:
    return "met" if met else "MISSED"
