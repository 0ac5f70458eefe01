"""`radixkv simulate --replicas`: hit rate, time to first token and imbalance by router and number of replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from radixkv.cache import LRU
from radixkv.cache.counted import counted
from radixkv.observe.simulate.replay import replay
from radixkv.observe.simulate.replicas.choosers import (
    ONE_CACHE,
    OTHERS,
    PREFIX,
    ROUTERS,
    Chooser,
    Prefix,
)
from radixkv.observe.simulate.replicas.cluster import Cluster, imbalance, least_imbalance
from radixkv.observe.simulate.replicas.cost_model import CostModel
from radixkv.observe.simulate.report import load, parse_names, parse_sizes
from radixkv.observe.simulate.trace import Trace
from radixkv.routing import Router

_SEED = 0
_WINDOW = 10.0
DEFAULT_BLOCKS = "30%"


@dataclass(slots=True)
class Row:
    """The results of one router with one number of replicas.

    Attributes:
        hit_rate: share of all blocks of prompts that hit.
        p50, p99: of the seconds to the first token.
        imbalance, least_imbalance: of prefill, see `radixkv.observe.simulate.replicas.cluster`.
    """

    router: str
    num_replicas: int
    hit_rate: float
    p50: float
    p99: float
    imbalance: float
    least_imbalance: float


@dataclass(slots=True)
class ReplicaReport:
    """All runs of one trace.

    Attributes:
        num_blocks: of all replicas together.
        num_ingresses: each with a prefix router of its own.
        load: the part of all replicas' time that the trace would take with one cache; its time is stretched to reach this.
        not_run: routers that need a package that is not installed.
    """

    trace: str
    num_requests: int
    num_blocks: int
    num_ingresses: int
    load: float
    cost: CostModel
    rows: list[Row] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)

    def plot(self, path: Path) -> None:
        """Draw hit rate and p99 time to first token against the number of replicas, one line per router."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 4.5), layout="constrained")
        rates, times = figure.subplots(1, 2)
        for router in dict.fromkeys(row.router for row in self.rows):
            rows = [row for row in self.rows if row.router == router]
            counts, style = [row.num_replicas for row in rows], ":" if router == ONE_CACHE else "-"
            rates.plot(counts, [row.hit_rate for row in rows], style, marker="o", label=router)
            times.plot(counts, [row.p99 for row in rows], style, marker="o", label=router)
        for axes, label in ((rates, "blocks hit / blocks requested"), (times, "p99 time to first token, s")):
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted({row.num_replicas for row in self.rows}), minor=False)
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.set_xlabel("replicas")
            axes.set_ylabel(label)
        times.set_yscale("log")
        rates.legend()
        figure.savefig(path)

    def print_to(self, console: Console) -> None:
        """Print the rows, and what was not run."""
        console.print(self._table())
        for router in self.not_run:
            console.print(f"not run: {router}, which needs `pip install 'ray[serve]'`", highlight=False)

    def _table(self) -> Table:
        table = Table(
            title=f"{counted(self.num_requests, 'request')}, {counted(self.num_blocks, 'block')} in all, load {self.load:g}"
        )
        table.add_column("replicas", justify="right")
        table.add_column("router")
        for name in ("hit rate", "p50 s", "p99 s", "imbalance", "least"):
            table.add_column(name, justify="right")
        before = None
        for row in self.rows:
            if before not in (None, row.num_replicas):
                table.add_section()
            before = row.num_replicas
            figures = (row.p50, row.p99, row.imbalance, row.least_imbalance)
            table.add_row(
                str(row.num_replicas), row.router, f"{row.hit_rate:.3f}", *(f"{figure:.2f}" for figure in figures)
            )
        return table


def parse_replicas(text: str) -> list[int]:
    """Numbers of replicas from ``4,16``.

    Raises:
        ValueError: an entry is not a whole number from 1 to 1,024.
    """
    counts = []
    for part in text.split(","):
        if not part.strip().isdecimal() or not 1 <= int(part) <= 1024:
            raise ValueError(f"--replicas: expected whole numbers from 1 to 1024, got {part!r}")
        counts.append(int(part))
    return counts


def run_router(
    trace: Trace,
    router: str,
    num_replicas: int,
    num_blocks: int,
    cost: CostModel,
    stretch: float = 1.0,
    num_ingresses: int = 1,
) -> Row:
    """Run a trace once.

    Args:
        router: one of `ROUTERS`.
        num_replicas: that share the requests.
        num_blocks: of all of them together.
        cost: how long things take.
        stretch: the factor by which the trace's time is stretched.
        num_ingresses: each with a prefix router of its own; the other routers are one for all.

    Raises:
        ImportError: the router needs a package that is not installed.
    """
    each = max(1, num_blocks // num_replicas)
    cluster = Cluster(trace, num_replicas, each, cost, one_cache=router == ONE_CACHE, stretch=stretch, window=_WINDOW)
    chooser: Chooser
    if router == PREFIX:
        own = [
            Router(trace.block_size, seconds_per_token=cost.prefill, clock=lambda: cluster.now)
            for _ in range(num_ingresses)
        ]
        chooser = Prefix(num_replicas, own, _SEED)
    else:
        chooser = OTHERS[router](num_replicas, _SEED)
    outcome = cluster.run(chooser)
    p50, p99 = np.percentile(outcome.first_token_seconds, [50, 99]).tolist()
    # The time after the last arrival, when only the longest queues are left, says nothing.
    num_windows = max(1, int(trace.requests[-1].time * stretch / _WINDOW))
    return Row(
        router,
        num_replicas,
        outcome.num_hit_blocks / max(1, trace.num_asked_blocks),
        p50,
        p99,
        imbalance(outcome.busy, num_windows),
        least_imbalance(outcome.busy, outcome.longest, num_windows),
    )


def stretch_for(trace: Trace, num_replicas: int, num_blocks: int, cost: CostModel, load: float) -> float:
    """The factor for a trace's time at which so many replicas with one cache would be busy for the part ``load`` of it."""
    num_hits = sum(replay(trace, num_blocks, LRU()))
    num_outputs = sum(r.num_output_tokens or len(r.output) * trace.block_size for r in trace.requests)
    work = cost.work((trace.num_asked_blocks - num_hits) * trace.block_size, num_outputs)
    duration = trace.requests[-1].time
    if not duration:
        raise ValueError("trace: all requests arrive at once, so there is no load to simulate")
    return work / (num_replicas * duration * load)


def simulate_replicas(
    console: Console,
    name: str,
    replicas: str,
    routers: str,
    blocks: str,
    load_factor: float,
    num_ingresses: int,
    cost: CostModel,
) -> ReplicaReport:
    """Read a trace, and run it behind each router.

    Raises:
        OSError, ValueError: an argument is invalid, or the trace has no blocks.
    """
    counts, names = parse_replicas(replicas), parse_names("--router", routers, ROUTERS)
    if not 0 < load_factor < math.inf:
        raise ValueError(f"--load: expected a finite number above 0, got {load_factor}")
    if num_ingresses > 1 and PREFIX not in names:
        raise ValueError(f"--ingresses: only with --router {PREFIX} or all, got {routers!r}")
    trace = load(name)
    sizes: Sequence[int] = parse_sizes(blocks, trace.num_distinct_blocks) if trace.num_distinct_blocks else []
    if len(sizes) != 1:
        raise ValueError(f"--blocks: with --replicas, expected one size, of all replicas together, got {blocks!r}")
    report = ReplicaReport(name, len(trace.requests), sizes[0], num_ingresses, load_factor, cost)
    for num_replicas in counts:
        stretch = stretch_for(trace, num_replicas, sizes[0], cost, load_factor)
        for router in names:
            with console.status(f"{router}, {counted(num_replicas, 'replica')}"):
                try:
                    report.rows.append(run_router(trace, router, num_replicas, sizes[0], cost, stretch, num_ingresses))
                except ImportError as error:
                    if routers != "all":
                        raise ValueError(
                            f"--router: {router} needs a package: pip install 'ray[serve]': {error}"
                        ) from error
                    if router not in report.not_run:
                        report.not_run.append(router)
    return report
