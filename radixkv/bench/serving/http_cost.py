"""`radixkv bench http-cost`: the overhead of HTTP over the engine, the same load through both in one run.

One side is a `radixkv serve` process, called over HTTP; the other is an `AsyncLLM` in this process, called directly. Rounds
alternate; each round has prompts of its own, so that no prompt is cached from an earlier round.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from radixkv.async_llm import AsyncLLM
from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.common.tables import figure_table
from radixkv.bench.serving.client import Answer, Client, HttpClient, Messages
from radixkv.bench.serving.load_test import Arrivals, collect_answered, request_progress
from radixkv.bench.serving.report import Report, make_report
from radixkv.bench.serving.server_process import server_process
from radixkv.bench.serving.workload import LoadShape
from radixkv.sampling_params import SamplingParams


class InProcessClient:
    """Sends to an `AsyncLLM` what `HttpClient` sends to a server."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def answer(self, messages: Messages, max_tokens: int, due: float) -> Answer:
        answer = Answer(due)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        async for output in self._llm.chat(messages, params):
            if output.outputs[0].text:
                answer.arrivals.append(time.perf_counter())
                answer.text += output.outputs[0].text
            answer.output_tokens += len(output.outputs[0].token_ids)
            answer.prompt_tokens, answer.cached_tokens = len(output.prompt_token_ids), output.num_cached_tokens
        answer.finished = time.perf_counter()
        return answer


@dataclass(frozen=True, slots=True)
class HttpCost:
    """Medians of rounds.

    Attributes:
        direct, http: the reports of every round.
    """

    direct: Sequence[Report]
    http: Sequence[Report]

    @property
    def ms_per_token(self) -> float:
        """Additional time of the whole load, divided by all tokens of all streams: HTTP's work per token."""
        return statistics.median(
            1e3 / http.output_tokens_per_s - 1e3 / direct.output_tokens_per_s
            for direct, http in zip(self.direct, self.http, strict=True)
        )

    @property
    def ms_between_tokens(self) -> float:
        """Additional inter-token latency of one stream, with all streams active."""
        return statistics.median(
            _token_ms(http) - _token_ms(direct) for direct, http in zip(self.direct, self.http, strict=True)
        )

    @property
    def throughput_lost(self) -> float:
        """Lost share of the output tokens per second."""
        return statistics.median(
            1 - http.output_tokens_per_s / direct.output_tokens_per_s
            for direct, http in zip(self.direct, self.http, strict=True)
        )


def _token_ms(report: Report) -> float:
    assert report.time_between_tokens is not None, "no answer had two tokens"
    return report.time_between_tokens.median_ms


def run_http_cost(
    console: Console, model: str | None, streams: int, answer_tokens: int, rounds: int, json_path: Path | None
) -> None:
    """Measure, print a table, write JSON.

    Raises:
        ModelLoadError: the model cannot be loaded.
        ValueError: the server did not start, or refused a request.
    """
    shape = LoadShape(conversations=streams, prefix_tokens=200, prompt_tokens=20, answer_tokens=answer_tokens)
    arguments = ["--max-num-seqs", str(streams), *([] if model is None else [model])]
    with console.status("loading the model twice"), server_process(*arguments) as server:
        llm = AsyncLLM(model, max_num_seqs=streams)
        cost = asyncio.run(_measure(console, llm, server.address, shape, rounds))
    document = {
        "machine": describe_machine("torch", "fastapi", "uvicorn", "httpx"),
        "load": asdict(shape),
        "ms_a_token": cost.ms_per_token,
        "ms_between_tokens": cost.ms_between_tokens,
        "throughput_lost": cost.throughput_lost,
        **{name: [asdict(report) for report in getattr(cost, name)] for name in ("direct", "http")},
    }
    write_figures(json_path, document)
    console.print(_table(cost, streams, rounds))
    console.print(
        f"HTTP adds {cost.ms_per_token:.2f} ms per token, {cost.ms_between_tokens:.2f} ms between two tokens of a stream, "
        f"and takes {cost.throughput_lost:.1%} of the throughput"
    )


async def _measure(console: Console, llm: AsyncLLM, url: str, shape: LoadShape, rounds: int) -> HttpCost:
    direct, http = InProcessClient(llm), HttpClient(url)
    clients: tuple[Client, ...] = (direct, http)
    arrivals = Arrivals(concurrency=shape.conversations)
    reports: list[list[Report]] = [[], []]
    async with llm, http:
        with request_progress(console) as progress:
            # The first round warms both up and does not count.
            for number in range(rounds + 1):
                for client, client_reports in zip(clients, reports, strict=True):
                    answers = await collect_answered(client, replace(shape, seed=number), arrivals, progress)
                    if number:
                        client_reports.append(make_report(answers))
    return HttpCost(*reports)


def _table(cost: HttpCost, streams: int, rounds: int) -> Table:
    table = figure_table("", "output tokens/s", "ms between tokens", title=f"{streams} streams, median of {rounds}")
    for name, reports in (("AsyncLLM", cost.direct), ("over HTTP", cost.http)):
        table.add_row(
            name,
            f"{statistics.median(report.output_tokens_per_s for report in reports):,.1f}",
            f"{statistics.median(map(_token_ms, reports)):.2f}",
        )
    return table
