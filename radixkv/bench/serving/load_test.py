"""`radixkv bench serve`: a load test of any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.serving.client import Answer, Client, HttpClient
from radixkv.bench.serving.pacing import run_closed_loop, run_open_loop
from radixkv.bench.serving.report import make_report, plot_latencies, report_lines, report_table
from radixkv.bench.serving.workload import LoadShape, make_conversations


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests are sent.

    Attributes:
        rate: conversations started per second on average; None: closed loop.
        concurrency: conversations in progress at all times in the closed loop.
    """

    rate: float | None = None
    concurrency: int = 16

    def __str__(self) -> str:
        return f"{self.concurrency} at a time" if self.rate is None else f"{self.rate:g} a second"


async def collect(client: Client, shape: LoadShape, arrivals: Arrivals, progress: Progress) -> list[Answer]:
    """Send the load, show the progress, and return every answer."""
    answers: list[Answer] = []
    task = progress.add_task("requests", total=shape.num_requests)

    def on_answer(answer: Answer) -> None:
        answers.append(answer)
        progress.advance(task)

    conversations = make_conversations(shape)
    if arrivals.rate is None:
        await run_closed_loop(client, conversations, shape.answer_tokens, arrivals.concurrency, on_answer)
    else:
        await run_open_loop(client, conversations, shape.answer_tokens, arrivals.rate, shape.seed, on_answer)
    return answers


async def collect_answered(client: Client, shape: LoadShape, arrivals: Arrivals, progress: Progress) -> list[Answer]:
    """`collect` for a bench whose figures mean nothing if some requests fail.

    Raises:
        ValueError: a request failed.
    """
    answers = await collect(client, shape, arrivals, progress)
    for answer in answers:
        if answer.error is not None:
            raise ValueError(f"the server refused a request: {answer.error}")
    return answers


def request_progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def run_serve(
    console: Console,
    client: HttpClient,
    url: str,
    shape: LoadShape,
    arrivals: Arrivals,
    json_path: Path | None,
    plot_path: Path | None,
) -> bool:
    """Measure, print, write JSON and plot; returns whether any request was answered.

    Raises:
        ValueError: the server cannot be reached.
    """

    async def measure() -> list[Answer]:
        async with client:
            with request_progress(console) as progress:
                return await collect(client, shape, arrivals, progress)

    answers = asyncio.run(measure())
    report = make_report(answers)
    title = f"{client.model}, {arrivals}"
    if plot_path is not None:
        plot_latencies(answers, title, plot_path)
        console.print(f"plot: {plot_path}")
    pacing: dict[str, float] = (
        {"concurrency": arrivals.concurrency} if arrivals.rate is None else {"rate": arrivals.rate}
    )
    document = {
        "machine": describe_machine("httpx"),
        "server": {"url": url, "model": client.model},
        "load": {**asdict(shape), **pacing},
        "report": asdict(report),
    }
    write_figures(json_path, document)
    console.print(report_table(report, title))
    for line in report_lines(report):
        console.print(line, highlight=False)
    return report.completed > 0
