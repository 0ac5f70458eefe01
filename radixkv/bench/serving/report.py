"""Aggregates answers: throughput, and latencies as median and 99th percentile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from radixkv.bench.common.percentiles import p99
from radixkv.bench.common.tables import figure_table
from radixkv.bench.serving.client import Answer


@dataclass(frozen=True, slots=True)
class Latency:
    """Statistics of one latency, in milliseconds."""

    median_ms: float
    p99_ms: float
    mean_ms: float
    max_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency | None:
        """The statistics of ``seconds``; None where it is empty."""
        if not seconds:
            return None
        ms = np.array(seconds) * 1e3
        return cls(float(np.median(ms)), 1e3 * p99(seconds), float(ms.mean()), float(ms.max()))


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one run.

    Attributes:
        duration_s: from the first request's due time to the end of the last answer.
        cached_tokens: of the prompts; None where the server does not report them.
        time_to_first_token: from a request's due time to its first piece of text (TTFT).
        time_between_tokens: per answer, the time from its first piece to its last, over its tokens but the first (TPOT).
        time_between_pieces: each gap between pieces (ITL). A piece may have several tokens; pauses show here.
        latency: from a request's due time to the end of its answer.
        errors: number of failed requests, by reason.
    """

    completed: int
    failed: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    time_to_first_token: Latency | None
    time_between_tokens: Latency | None
    time_between_pieces: Latency | None
    latency: Latency | None
    errors: Mapping[str, int]


def make_report(answers: Sequence[Answer]) -> Report:
    """Aggregate ``answers``, at least one; failed ones count in ``failed`` and ``errors`` only."""
    succeeded = [answer for answer in answers if answer.error is None]
    duration = max(answer.finished for answer in answers) - min(answer.due for answer in answers)
    output_tokens = sum(answer.output_tokens for answer in succeeded)
    cached_counts = [answer.cached_tokens for answer in succeeded if answer.cached_tokens is not None]
    return Report(
        completed=len(succeeded),
        failed=len(answers) - len(succeeded),
        duration_s=duration,
        requests_per_s=len(succeeded) / duration,
        output_tokens_per_s=output_tokens / duration,
        prompt_tokens=sum(answer.prompt_tokens for answer in succeeded),
        cached_tokens=sum(cached_counts) if cached_counts else None,
        output_tokens=output_tokens,
        time_to_first_token=Latency.of(times_to_first_token(succeeded)),
        time_between_tokens=Latency.of(times_between_tokens(succeeded)),
        time_between_pieces=Latency.of([gap for answer in succeeded for gap in np.diff(answer.arrivals).tolist()]),
        latency=Latency.of([answer.finished - answer.due for answer in succeeded]),
        errors=dict(Counter(answer.error for answer in answers if answer.error is not None)),
    )


def times_to_first_token(answers: Sequence[Answer]) -> list[float]:
    return [answer.arrivals[0] - answer.due for answer in answers if answer.arrivals]


def times_between_tokens(answers: Sequence[Answer]) -> list[float]:
    return [
        (answer.arrivals[-1] - answer.arrivals[0]) / (answer.output_tokens - 1)
        for answer in answers
        if answer.output_tokens > 1 and answer.arrivals
    ]


def report_table(report: Report, title: str) -> Table:
    """The latencies as a table for the terminal."""
    table = figure_table("milliseconds", "median", "p99", "mean", "max", title=title)
    for name, latency in (
        ("time to first token", report.time_to_first_token),
        ("time between tokens, per request", report.time_between_tokens),
        ("time between pieces", report.time_between_pieces),
        ("request, end to end", report.latency),
    ):
        figures = () if latency is None else (latency.median_ms, latency.p99_ms, latency.mean_ms, latency.max_ms)
        table.add_row(name, *(f"{figure:,.1f}" for figure in figures))
    return table


def report_lines(report: Report) -> list[str]:
    """Counts and throughput as lines for the terminal."""
    cached = "unknown" if report.cached_tokens is None else f"{report.cached_tokens:,}"
    lines = [
        f"{report.completed:,} requests answered, {report.failed:,} failed, in {report.duration_s:.1f} s",
        f"{report.requests_per_s:.2f} requests/s, {report.output_tokens_per_s:,.1f} output tokens/s",
        f"{report.prompt_tokens:,} prompt tokens, of which cached: {cached}; {report.output_tokens:,} output tokens",
    ]
    return lines + [f"{count} x {error}" for error, count in report.errors.items()]


def plot_latencies(answers: Sequence[Answer], title: str, path: Path) -> None:
    """Plot the cumulative distributions of the latencies, and latencies over the time of the run."""
    from matplotlib.figure import Figure

    succeeded = sorted((answer for answer in answers if answer.error is None), key=lambda answer: answer.due)
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    latency_axis, gap_axis, time_axis = figure.subplots(1, 3)
    first = times_to_first_token(succeeded)
    for label, seconds in (
        ("first token", first),
        ("whole answer", [answer.finished - answer.due for answer in succeeded]),
    ):
        _plot_distribution(latency_axis, label, seconds)
    latency_axis.set(xlabel="seconds from the due time", ylabel="share of requests")
    _plot_distribution(gap_axis, "mean of a request", times_between_tokens(succeeded))
    _plot_distribution(
        gap_axis, "each piece", [gap for answer in succeeded for gap in np.diff(answer.arrivals).tolist()]
    )
    gap_axis.set(xlabel="seconds between tokens", ylabel="share of all")
    if succeeded:
        start = succeeded[0].due
        with_text = [answer.due - start for answer in succeeded if answer.arrivals]
        time_axis.plot(with_text, first, ".", label="first token")
        time_axis.plot(
            [answer.due - start for answer in succeeded],
            [answer.finished - answer.due for answer in succeeded],
            ".",
            label="whole answer",
        )
    time_axis.set(xlabel="due time, seconds", ylabel="seconds", ylim=(0, None))
    # Limits are set last: earlier, they would disable autoscaling for what is plotted later.
    for axis in (latency_axis, gap_axis):
        axis.set(xlim=(0, None), ylim=(0, 1))
    figure.suptitle(title)
    for axis in (latency_axis, gap_axis, time_axis):
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    figure.savefig(path, dpi=110)


def _plot_distribution(axis: Any, label: str, seconds: Sequence[float]) -> None:
    if not seconds:
        return
    ordered = np.sort(seconds)
    shares = np.arange(1, len(ordered) + 1) / len(ordered)
    axis.plot(ordered, shares, label=f"{label}: median {np.median(ordered):.3g}, p99 {p99(seconds):.3g}")
