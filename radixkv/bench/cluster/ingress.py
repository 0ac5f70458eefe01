"""`radixkv bench cluster`: what it costs to go through an ingress, and how much several caches find of what one cache would.

The same conversations go to one server, to an ingress over one replica (the cost of the path), and to an ingress over several
(what is found cached). Rounds alternate; each has prompts of its own. Costs are measured on streams that all begin at once,
and on one request beside streams that flow.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from radixkv.bench.cluster.flowing import first_tokens_beside
from radixkv.bench.cluster.replica_memory import process_memory
from radixkv.bench.cluster.replica_process import cluster
from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.serving.client import Answer, HttpClient
from radixkv.bench.serving.load_test import Arrivals, collect_answered, request_progress
from radixkv.bench.serving.report import Latency, Report, make_report
from radixkv.bench.serving.server_process import BenchProcess, server_process
from radixkv.bench.serving.workload import LoadShape

_OPTIONS = ("--dtype", "float32")
_PROBES = 40
_T = TypeVar("_T")


def run_cluster_bench(
    console: Console, model: str | None, sizes: Sequence[int], streams: int, rounds: int, json_path: Path | None
) -> None:
    """Measure and print.

    Args:
        model: to serve; None: the default one.
        sizes: numbers of replicas of the larger clusters, side by side.
        streams: answers in progress at a time, for the costs.
        rounds: for the costs; the median counts.
        json_path: where to write the figures, too.

    Raises:
        ValueError: a process did not start, or a request failed.
    """
    named = [] if model is None else [model]
    with ExitStack() as stack:
        server = stack.enter_context(server_process(*named, *_OPTIONS))
        _, over_one = stack.enter_context(cluster(1, model, *_OPTIONS))
        addresses = {"one server": server.address, "1 replica": over_one.address}
        replicas: dict[str, list[BenchProcess]] = {}
        for size in sizes:
            each, over_several = stack.enter_context(cluster(size, model, *_OPTIONS))
            replicas[f"{size} replicas"] = list(each.values())
            addresses[f"{size} replicas"] = over_several.address
        reports: dict[str, list[Report]] = {name: [] for name in addresses}
        beside: dict[str, list[float]] = {name: [] for name in ("one server", "1 replica")}
        progress = stack.enter_context(request_progress(console))

        def ask(name: str, load: Callable[[HttpClient], Awaitable[_T]]) -> _T:
            async def main() -> _T:
                async with HttpClient(addresses[name]) as client:
                    return await load(client)

            return asyncio.run(main())

        def run(name: str, shape: LoadShape, concurrency: int) -> list[Answer]:
            return ask(
                name, lambda client: collect_answered(client, shape, Arrivals(concurrency=concurrency), progress)
            )

        def probe(name: str, seed: int) -> list[float]:
            return ask(name, lambda client: first_tokens_beside(client, streams - 1, _PROBES, seed))

        for number in range(rounds + 1):  # the first warms up
            shape = LoadShape(conversations=streams, prefix_tokens=100, prompt_tokens=30, seed=number)
            for name in addresses:
                answers = run(name, shape, streams)
                if number:
                    reports[name].append(make_report(answers))
        for number in range(rounds):
            for name, seconds in beside.items():
                seconds += probe(name, seed=2000 + number)
        talks = LoadShape(24, 3, 4, 300, 40, 32, seed=1000)
        found = {name: run(name, talks, 8) for name in ("one server", *replicas)}
        memory = {name: [process_memory(one.pid) for one in each] for name, each in replicas.items()}
    kept = {name: make_report(answers) for name, answers in found.items()}
    texts = {name: sorted(answer.text for answer in answers) for name, answers in found.items()}
    by_one = max(1, kept["one server"].cached_tokens or 0)
    shares = {name: (kept[name].cached_tokens or 0) / by_one for name in replicas}
    equal = {name: texts[name] == texts["one server"] for name in replicas}
    figures = {
        "machine": describe_machine(),
        "costs": {name: [asdict(report) for report in each] for name, each in reports.items()},
        "first_tokens_beside_streams": beside,
        "conversations": {name: asdict(report) for name, report in kept.items()},
        "cached_share": shares,
        "equal_answers": equal,
        "replicas_mib": {name: [asdict(one) for one in each] for name, each in memory.items()},
    }
    write_figures(json_path, figures)
    _print(console, reports)
    alone, over_ingress = (1e3 * statistics.median(seconds) for seconds in beside.values())
    console.print(
        f"beside {streams - 1} streams that flow, a first token comes after {alone:.1f} ms from one server, "
        f"and {over_ingress:.1f} ms over an ingress: {over_ingress - alone:+.1f} ms"
    )
    for name in replicas:
        mib = statistics.median(one.proportional for one in memory[name])
        console.print(
            f"24 conversations of 3 turns, 4 system prompts, {name} of {mib:,.0f} MiB: {shares[name]:.1%} of one server's "
            f"cached tokens; answers {'equal' if equal[name] else 'DIFFER'}"
        )


def _print(console: Console, reports: dict[str, list[Report]]) -> None:
    table = Table(title="medians of rounds")
    for column in ("", "first token, ms", "between tokens, ms", "tokens/s"):
        table.add_column(column, justify="left" if not column else "right")
    for name, each in reports.items():
        table.add_row(
            name,
            f"{_median(each, lambda report: _ms(report.time_to_first_token)):,.1f}",
            f"{_median(each, lambda report: _ms(report.time_between_tokens)):,.2f}",
            f"{_median(each, lambda report: report.output_tokens_per_s):,.1f}",
        )
    console.print(table)


def _median(reports: Sequence[Report], figure: Callable[[Report], float]) -> float:
    return statistics.median(map(figure, reports))


def _ms(latency: Latency | None) -> float:
    assert latency is not None, "no answer had two tokens"
    return latency.median_ms
