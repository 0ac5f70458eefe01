"""What many answers add up to: throughput, and latencies as median and 99th percentile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from radixkv.bench.serve_client import Answer


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds."""

    median_ms: float
    p99_ms: float
    mean_ms: float
    max_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency | None:
        """None where nothing was measured."""
        if not seconds:
            return None
        ms = np.array(seconds) * 1e3
        return cls(float(np.median(ms)), float(np.percentile(ms, 99)), float(ms.mean()), float(ms.max()))


@dataclass(frozen=True, slots=True)
class Report:
    """One run.

    Attributes:
        duration_s: from the first request's due time to the end of the last answer.
        cached_tokens: of the prompts; None where the server does not say.
        time_to_first_token: from when a request was due to its first piece of text.
        time_between_tokens: of each answer the time from its first piece to its last, over its tokens but the first.
        time_between_pieces: each gap by itself. A piece may be several tokens: pauses show here.
        latency: from when a request was due to the end of its answer.
        errors: how many requests failed, by reason.
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
    """Add up ``answers``, of which there is at least one; failed ones count as such and in nothing else."""
    good = [answer for answer in answers if answer.error is None]
    duration = max(answer.finished for answer in answers) - min(answer.due for answer in answers)
    output_tokens = sum(answer.output_tokens for answer in good)
    known = [answer.cached_tokens for answer in good if answer.cached_tokens is not None]
    return Report(
        completed=len(good),
        failed=len(answers) - len(good),
        duration_s=duration,
        requests_per_s=len(good) / duration,
        output_tokens_per_s=output_tokens / duration,
        prompt_tokens=sum(answer.prompt_tokens for answer in good),
        cached_tokens=sum(known) if known else None,
        output_tokens=output_tokens,
        time_to_first_token=Latency.of(times_to_first_token(good)),
        time_between_tokens=Latency.of(times_between_tokens(good)),
        time_between_pieces=Latency.of([gap for answer in good for gap in np.diff(answer.arrivals).tolist()]),
        latency=Latency.of([answer.finished - answer.due for answer in good]),
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
    """For the terminal."""
    table = Table(title=title)
    for column in ("milliseconds", "median", "p99", "mean", "max"):
        table.add_column(column, justify="left" if column == "milliseconds" else "right")
    for name, latency in (
        ("time to first token", report.time_to_first_token),
        ("time between tokens, a request", report.time_between_tokens),
        ("time between pieces", report.time_between_pieces),
        ("request, end to end", report.latency),
    ):
        figures = () if latency is None else (latency.median_ms, latency.p99_ms, latency.mean_ms, latency.max_ms)
        table.add_row(name, *(f"{figure:,.1f}" for figure in figures))
    return table


def report_lines(report: Report) -> list[str]:
    """The figures that are no latencies."""
    cached = "unknown" if report.cached_tokens is None else f"{report.cached_tokens:,}"
    lines = [
        f"{report.completed:,} requests answered, {report.failed:,} failed, in {report.duration_s:.1f} s",
        f"{report.requests_per_s:.2f} requests/s, {report.output_tokens_per_s:,.1f} output tokens/s",
        f"{report.prompt_tokens:,} prompt tokens, of which cached: {cached}; {report.output_tokens:,} output tokens",
    ]
    return lines + [f"{count} x {error}" for error, count in report.errors.items()]


def plot_latencies(answers: Sequence[Answer], title: str, path: Path) -> None:
    """Draw which part of the requests was at least so fast, and latencies over the time of the run."""
    from matplotlib.figure import Figure

    good = sorted((answer for answer in answers if answer.error is None), key=lambda answer: answer.due)
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    shares, gaps, over_time = figure.subplots(1, 3)
    first = times_to_first_token(good)
    for label, seconds in (("first token", first), ("whole answer", [answer.finished - answer.due for answer in good])):
        _draw_share(shares, label, seconds)
    shares.set(xlabel="seconds from when the request was due", ylabel="part of all requests")
    _draw_share(gaps, "mean of a request", times_between_tokens(good))
    _draw_share(gaps, "each piece", [gap for answer in good for gap in np.diff(answer.arrivals).tolist()])
    gaps.set(xlabel="seconds between tokens", ylabel="part of all")
    if good:
        start = good[0].due
        with_text = [answer.due - start for answer in good if answer.arrivals]
        over_time.plot(with_text, first, ".", label="first token")
        over_time.plot(
            [answer.due - start for answer in good],
            [answer.finished - answer.due for answer in good],
            ".",
            label="whole answer",
        )
    over_time.set(xlabel="due at, seconds", ylabel="seconds", ylim=(0, None))
    # Limits come last: they would hold what is drawn later to what was drawn before.
    for axis in (shares, gaps):
        axis.set(xlim=(0, None), ylim=(0, 1))
    figure.suptitle(title)
    for axis in (shares, gaps, over_time):
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    figure.savefig(path, dpi=110)


def _draw_share(axis: Any, label: str, seconds: Sequence[float]) -> None:
    if not seconds:
        return
    ordered = np.sort(seconds)
    median, p99 = np.median(ordered), np.percentile(ordered, 99)
    parts = np.arange(1, len(ordered) + 1) / len(ordered)
    axis.plot(ordered, parts, label=f"{label}: median {median:.3g}, p99 {p99:.3g}")
