"""`radixkv bench cluster`: what it costs to go through an ingress, and how much several caches find of what one cache would.

The same conversations go to one server, to an ingress over one replica (the cost of the path), and to an ingress over several
(what is found cached). Rounds alternate; each has prompts of its own. Costs are measured on streams that all begin at once,
and on one request beside streams in progress.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from radixkv.bench.cluster.first_tokens_beside import first_tokens_beside
from radixkv.bench.cluster.replica_memory import ProcessMemory, process_memory
from radixkv.bench.cluster.replica_process import cluster
from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.common.tables import figure_table
from radixkv.bench.serving.client import Answer, HttpClient
from radixkv.bench.serving.load_test import Arrivals, collect_answered, request_progress
from radixkv.bench.serving.report import Latency, Report, make_report
from radixkv.bench.serving.server_process import BenchProcess, server_process
from radixkv.bench.serving.workload import LoadShape

_OPTIONS = ("--dtype", "float32")
_PROBES = 40
# 24 conversations of 3 turns under 4 system prompts, 8 at a time.
_CONVERSATIONS = LoadShape(24, 3, 4, 300, 40, 32, seed=1000)
_CONCURRENCY = 8
_ONE_SERVER, _ONE_REPLICA = "one server", "1 replica"


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """What was measured, by the name of the server or of the replicas behind an ingress.

    Attributes:
        costs: of streams that all begin at once, one report per round.
        beside: seconds to the first tokens of single requests beside streams in progress.
        conversations: of the same conversations, by one server and over several replicas.
        texts: all answers in these, sorted.
        memory: of each of several replicas.
    """

    costs: dict[str, list[Report]]
    beside: dict[str, list[float]]
    conversations: dict[str, Report]
    texts: dict[str, list[str]]
    memory: dict[str, list[ProcessMemory]]

    def cached_share(self, name: str) -> float:
        """Tokens that several replicas found cached, over those that one server found."""
        several, one = (self.conversations[each].cached_tokens or 0 for each in (name, _ONE_SERVER))
        return several / max(1, one)

    def has_equal_answers(self, name: str) -> bool:
        """Whether several replicas answered as one server did."""
        return self.texts[name] == self.texts[_ONE_SERVER]


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
    with ExitStack() as stack:
        server = stack.enter_context(server_process(*([] if model is None else [model]), *_OPTIONS))
        _, over_one = stack.enter_context(cluster(1, model, *_OPTIONS))
        addresses = {_ONE_SERVER: server.address, _ONE_REPLICA: over_one.address}
        replicas: dict[str, list[BenchProcess]] = {}
        for size in sizes:
            each, over_several = stack.enter_context(cluster(size, model, *_OPTIONS))
            replicas[f"{size} replicas"] = list(each.values())
            addresses[f"{size} replicas"] = over_several.address
        progress = stack.enter_context(request_progress(console))
        measured = asyncio.run(_measure(addresses, replicas, streams, rounds, progress))
    figures = {
        "machine": describe_machine("torch", "transformers"),
        "costs": {name: [asdict(report) for report in each] for name, each in measured.costs.items()},
        "first_tokens_beside_streams": measured.beside,
        "conversations": {name: asdict(report) for name, report in measured.conversations.items()},
        "cached_share": {name: measured.cached_share(name) for name in replicas},
        "equal_answers": {name: measured.has_equal_answers(name) for name in replicas},
        "replicas_mib": {name: [asdict(one) for one in each] for name, each in measured.memory.items()},
    }
    write_figures(json_path, figures)
    _print(console, measured, streams)


async def _measure(
    addresses: Mapping[str, str],
    replicas: Mapping[str, Sequence[BenchProcess]],
    streams: int,
    rounds: int,
    progress: Progress,
) -> ClusterFigures:
    async def answers_of(name: str, shape: LoadShape, concurrency: int) -> list[Answer]:
        async with HttpClient(addresses[name]) as client:
            return await collect_answered(client, shape, Arrivals(concurrency=concurrency), progress)

    costs: dict[str, list[Report]] = {name: [] for name in addresses}
    for number in range(rounds + 1):  # the first warms up
        shape = LoadShape(conversations=streams, prefix_tokens=100, prompt_tokens=30, seed=number)
        for name, reports in costs.items():
            answers = await answers_of(name, shape, streams)
            if number:
                reports.append(make_report(answers))
    beside: dict[str, list[float]] = {_ONE_SERVER: [], _ONE_REPLICA: []}
    for number in range(rounds):
        for name, seconds in beside.items():
            async with HttpClient(addresses[name]) as client:
                seconds += await first_tokens_beside(client, streams - 1, _PROBES, seed=2000 + number)
    found = {name: await answers_of(name, _CONVERSATIONS, _CONCURRENCY) for name in (_ONE_SERVER, *replicas)}
    return ClusterFigures(
        costs,
        beside,
        {name: make_report(answers) for name, answers in found.items()},
        {name: sorted(answer.text for answer in answers) for name, answers in found.items()},
        {name: [process_memory(one.pid) for one in each] for name, each in replicas.items()},
    )


def _print(console: Console, measured: ClusterFigures, streams: int) -> None:
    table = figure_table("", "first token, ms", "between tokens, ms", "tokens/s", title="medians of rounds")
    for name, each in measured.costs.items():
        table.add_row(
            name,
            f"{_median(each, lambda report: _ms(report.time_to_first_token)):,.1f}",
            f"{_median(each, lambda report: _ms(report.time_between_tokens)):,.2f}",
            f"{_median(each, lambda report: report.output_tokens_per_s):,.1f}",
        )
    console.print(table)
    alone, over_ingress = (1e3 * statistics.median(seconds) for seconds in measured.beside.values())
    console.print(
        f"beside {streams - 1} streams in progress, a first token comes after {alone:.1f} ms from one server, "
        f"and {over_ingress:.1f} ms over an ingress: {over_ingress - alone:+.1f} ms"
    )
    for name, each_memory in measured.memory.items():
        mib = statistics.median(one.proportional for one in each_memory)
        console.print(
            f"{_CONVERSATIONS.conversations} conversations of {_CONVERSATIONS.turns} turns, {_CONVERSATIONS.prefixes} system "
            f"prompts, {name} of {mib:,.0f} MiB: {measured.cached_share(name):.1%} of one server's cached tokens; answers "
            f"{'equal' if measured.has_equal_answers(name) else 'DIFFER'}"
        )


def _median(reports: Sequence[Report], figure: Callable[[Report], float]) -> float:
    return statistics.median(map(figure, reports))


def _ms(latency: Latency | None) -> float:
    assert latency is not None, "no answer had two tokens"
    return latency.median_ms
