"""The load generator against a small server that counts for itself: requests sent, and their aggregated results."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from rich.console import Console
from rich.progress import Progress
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from support.preloaded_process import COMMAND_LINE, run_preloaded
from typer.testing import CliRunner

from radixkv.bench.serving.client import Answer, HttpClient, Messages
from radixkv.bench.serving.load_test import Arrivals, collect, collect_answered
from radixkv.bench.serving.pacing import run_open_loop
from radixkv.bench.serving.report import make_report, plot_latencies, report_lines, report_table
from radixkv.bench.serving.workload import LoadShape, make_conversations
from radixkv.cli.main import app


class FakeServer:
    """Answers every request with ``max_tokens`` words, and records the requests.

    Attributes:
        min_concurrency: no request is answered until this many are in flight at once.
        refusal: the response to every third request.
        reports_cached_tokens: report cached tokens, as many as the prompt has messages.
        field: of a delta, which holds the words.
        num_listed: how often the models were listed.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.num_listed = 0
        self.min_concurrency = 1
        self.refusal: Response | None = None
        self.fails_mid_stream = False
        self.reports_cached_tokens = True
        self.field = "content"
        self.max_in_flight = 0
        self._num_in_flight = 0
        self._enough_in_flight = asyncio.Event()
        app = Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
            ]
        )
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
        self._thread = threading.Thread(target=self._server.run)

    @property
    def url(self) -> str:
        (listener,) = self._server.servers[0].sockets
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    def start(self) -> None:
        started = threading.Event()
        startup = self._server.startup

        async def notifying_startup(*args: Any, **options: Any) -> None:
            await startup(*args, **options)
            started.set()

        self._server.startup = notifying_startup  # type: ignore[method-assign]
        self._thread.start()
        assert started.wait(600)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def models(self, request: Request) -> Response:
        self.num_listed += 1
        return JSONResponse({"object": "list", "data": [{"id": "the-model"}]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.refusal is not None and len(self.bodies) % 3 == 0:
            return self.refusal
        return StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self._num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self._num_in_flight)
        if self._num_in_flight >= self.min_concurrency:
            self._enough_in_flight.set()
        await self._enough_in_flight.wait()
        yield ": a comment\n\n"
        yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for index in range(body["max_tokens"]):
            # A line separator inside a piece is text, not the end of a line.
            yield _event({"choices": [{"index": 0, "delta": {self.field: f"word\u2028{index} "}}]})
        if self.fails_mid_stream:
            yield _event({"error": {"message": "the engine broke"}})
        usage: dict[str, Any] = {"prompt_tokens": 100, "completion_tokens": body["max_tokens"]}
        if self.reports_cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": len(body["messages"])}
        yield _event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"
        self._num_in_flight -= 1


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    server.start()
    yield server
    server.stop()


def run(
    server: FakeServer,
    shape: LoadShape,
    arrivals: Arrivals,
    collecting: Callable[[HttpClient, LoadShape, Arrivals, Progress], Awaitable[list[Answer]]] = collect,
) -> list[Answer]:
    async def measure() -> list[Answer]:
        async with HttpClient(server.url) as client:
            return await collecting(client, shape, arrivals, Progress(console=Console(quiet=True)))

    return asyncio.run(measure())


def test_every_request_has_the_configured_shape_and_is_counted(server: FakeServer) -> None:
    shape = LoadShape(conversations=10, prefixes=3, prefix_tokens=7, prompt_tokens=4, answer_tokens=5)
    report = make_report(run(server, shape, Arrivals(concurrency=4)))
    assert (report.completed, report.failed, report.errors) == (10, 0, {})
    assert (report.prompt_tokens, report.cached_tokens, report.output_tokens) == (1000, 20, 50)
    for body in server.bodies:
        assert body["model"] == "the-model"
        assert body["max_tokens"] == 5
        assert body["stream"] is True
        assert body["ignore_eos"] is True
        assert [len(message["content"].split()) for message in body["messages"]] == [7, 4]
    assert len({body["messages"][0]["content"] for body in server.bodies}) == 3
    assert len({body["messages"][1]["content"] for body in server.bodies}) == 10


def test_the_closed_loop_keeps_exactly_its_concurrency_in_flight(server: FakeServer) -> None:
    server.min_concurrency = 6
    answers = run(server, LoadShape(conversations=20, answer_tokens=1), Arrivals(concurrency=6))
    assert len(answers) == 20
    assert server.max_in_flight == 6


def test_which_model_there_is_is_asked_once_before_anything_is_timed(server: FakeServer) -> None:
    """Each of the first answers asked, and the time to its first token included that."""
    assert len(run(server, LoadShape(conversations=6, answer_tokens=1), Arrivals(concurrency=6))) == 6
    assert server.num_listed == 1


def test_a_turn_includes_all_messages_before_it(server: FakeServer) -> None:
    shape = LoadShape(conversations=3, turns=4, prefix_tokens=0, answer_tokens=2)
    assert len(run(server, shape, Arrivals(concurrency=3))) == 12
    answer = "word\u20280 word\u20281 "
    longest = [body["messages"] for body in server.bodies if len(body["messages"]) == 7]
    assert len(longest) == 3
    for messages in longest:
        assert [message["role"] for message in messages] == ["user", "assistant"] * 3 + ["user"]
        assert [message["content"] for message in messages[1::2]] == [answer] * 3
    for length in (1, 3, 5):
        earlier = [body["messages"] for body in server.bodies if len(body["messages"]) == length]
        assert sorted(map(str, earlier)) == sorted(str(messages[:length]) for messages in longest)


def test_refusals_and_broken_streams_are_counted_by_reason(server: FakeServer) -> None:
    server.refusal = JSONResponse({"error": {"message": "full"}}, 429)
    report = make_report(run(server, LoadShape(conversations=9, answer_tokens=3), Arrivals(concurrency=2)))
    assert (report.completed, report.failed, report.output_tokens) == (6, 3, 18)
    assert report.errors == {'HTTP 429: {"error":{"message":"full"}}': 3}
    server.refusal, server.fails_mid_stream = None, True
    report = make_report(run(server, LoadShape(conversations=2, answer_tokens=3), Arrivals()))
    assert (report.completed, report.failed) == (0, 2)
    assert all("the engine broke" in reason for reason in report.errors)
    assert report.latency is None


def test_a_bench_of_a_servers_cost_ends_where_a_request_is_refused(server: FakeServer) -> None:
    """`bench cluster` counted refusals as answers: if all were refused, a first token took 0 ms."""
    shape = LoadShape(conversations=3, answer_tokens=2)
    assert len(run(server, shape, Arrivals(), collect_answered)) == 3
    server.refusal = JSONResponse({"error": {"message": "full"}}, 429)
    with pytest.raises(ValueError, match=r"the server refused a request: HTTP 429: .*full"):
        run(server, shape, Arrivals(), collect_answered)


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_what_a_model_thinks_counts_as_tokens_and_is_no_text(server: FakeServer, field: str) -> None:
    """Otherwise the time between tokens would be that of the visible ones, over all."""
    server.field = field
    answers = run(server, LoadShape(conversations=2, answer_tokens=7), Arrivals(concurrency=1))
    assert [(len(answer.arrivals), answer.output_tokens, answer.text) for answer in answers] == [(7, 7, "")] * 2


def test_unreported_cached_tokens_are_unknown(server: FakeServer) -> None:
    server.reports_cached_tokens = False
    report = make_report(run(server, LoadShape(conversations=2, answer_tokens=3), Arrivals()))
    assert report.cached_tokens is None
    assert "cached: unknown" in report_lines(report)[2]


def test_the_open_loop_does_not_wait_for_answers() -> None:
    """Answers arrive only after all requests have been sent: a closed loop would deadlock."""

    class Slow:
        def __init__(self) -> None:
            self.dues: list[float] = []
            self.all_sent = asyncio.Event()

        async def answer(self, messages: Messages, max_tokens: int, due: float) -> Answer:
            self.dues.append(due)
            if len(self.dues) == 50:
                self.all_sent.set()
            await self.all_sent.wait()
            return Answer(due, [due + 1], due + 2, "x", output_tokens=1)

    async def send() -> list[list[float]]:
        dues = []
        for seed in (1, 1, 2):
            client = Slow()
            await run_open_loop(client, make_conversations(LoadShape(50)), 1, 5000.0, seed, lambda answer: None)
            dues.append([due - client.dues[0] for due in client.dues])
        return dues

    first, again, other = asyncio.run(send())
    assert first == sorted(first)
    assert first == pytest.approx(again, abs=1e-6)  # a clock that has run for months has no finer seconds
    assert first != pytest.approx(other, abs=1e-6)


def test_the_report_computes_each_statistic_by_its_definition() -> None:
    """A hundred answers: number i is due at i, has its first piece after i ms, then 10 tokens in 9 gaps of 2 i ms."""
    answers = []
    for i in range(1, 101):
        first = i + i / 1000
        arrivals = [first + 2 * i * gap / 1000 for gap in range(10)]
        answers.append(
            Answer(float(i), arrivals, arrivals[-1] + 0.001, prompt_tokens=20, cached_tokens=15, output_tokens=10)
        )
    answers.append(Answer(0.0, [], 500.0, error="HTTP 503: no"))
    report = make_report(answers)
    assert report.duration_s == 500.0
    assert report.requests_per_s == pytest.approx(100 / 500)
    assert report.output_tokens_per_s == pytest.approx(1000 / 500)
    assert (report.prompt_tokens, report.cached_tokens, report.output_tokens) == (2000, 1500, 1000)
    assert (report.completed, report.failed) == (100, 1)
    first_token = report.time_to_first_token
    assert first_token is not None
    assert report.time_between_tokens is not None
    assert report.time_between_pieces is not None
    assert report.latency is not None
    assert (first_token.median_ms, first_token.max_ms) == pytest.approx((50.5, 100.0))
    assert first_token.p99_ms == pytest.approx(99.01)
    assert report.time_between_tokens.median_ms == pytest.approx(2 * 50.5)
    assert report.time_between_pieces.mean_ms == pytest.approx(2 * 50.5)
    assert report.latency.max_ms == pytest.approx(100 + 9 * 200 + 1)


def test_the_table_and_the_plot_are_drawn(tmp_path: Path) -> None:
    answers = [Answer(0.0, [0.1, 0.2], 0.3, output_tokens=2), Answer(0.0, [], 0.3, error="no")]
    for subset in (answers, answers[1:]):
        plot_latencies(subset, "the-model", tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
        table = report_table(make_report(subset), "the-model")
        assert table.row_count == 4


def test_the_command_writes_its_figures(server: FakeServer, tmp_path: Path) -> None:
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    options = "--conversations 12 --turns 2 --rate 1000 --answer-tokens 3 --no-ignore-eos --api-key k".split()
    command = ["bench", "serve", "--url", f"{server.url}/v1", *options, "--json", str(figures), "--plot", str(plot)]
    result = run_preloaded(COMMAND_LINE, *command)
    assert result.returncode == 0, result.stderr
    assert "24 requests answered" in result.stdout
    document = json.loads(figures.read_text())
    assert document["report"]["completed"] == 24
    assert document["report"]["output_tokens"] == 72
    assert document["load"]["rate"] == 1000
    assert "concurrency" not in document["load"]
    assert document["server"]["model"] == "the-model"
    assert plot.exists()
    assert all("ignore_eos" not in body for body in server.bodies)


def test_a_models_name_and_a_refusal_are_printed_as_they_are(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they have in brackets was taken for markup: it was left out, or ended the command with an error."""
    server.refusal = JSONResponse({"error": {"message": "expected [a, b] before [/INST]"}}, 400)
    monkeypatch.setenv("COLUMNS", "200")
    options = ["--conversations", "3", "--answer-tokens", "1", "--model", "[red] oak [/INST] :smiley:"]
    result = CliRunner().invoke(app, ["bench", "serve", "--url", server.url, *options], catch_exceptions=False)
    assert result.exit_code == 0
    assert "[red] oak [/INST] :smiley:, 16 at a time" in result.output
    assert '1 x HTTP 400: {"error":{"message":"expected [a, b] before [/INST]"}}' in result.output


def test_a_number_of_conversations_at_a_time_is_not_taken_with_a_rate() -> None:
    """It was ignored, and written with the figures as if it had counted."""
    result = CliRunner().invoke(app, ["bench", "serve", "--rate", "2", "--concurrency", "8"])
    assert result.exit_code == 1
    assert str(result.exception).startswith("--concurrency: not together with --rate")


def test_an_unreachable_server_is_a_one_line_error() -> None:
    command = [sys.executable, "-m", "radixkv", "bench", "serve", "--url", "http://127.0.0.1:9"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("radixkv: --url:")
    assert result.stderr.count("\n") == 1


@pytest.mark.usefixtures("preloaded_servers")
def test_the_cost_of_http_is_measured_on_equal_work(tiny_model_folder: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = ["--streams", "2", "--answer-tokens", "3", "--rounds", "1", "--json", str(figures)]
    command = ["bench", "http-cost", "--model", str(tiny_model_folder), *options]
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    document = json.loads(figures.read_text())
    ((direct,), (http,)) = document["direct"], document["http"]
    for name in ("completed", "prompt_tokens", "cached_tokens", "output_tokens"):
        assert direct[name] == http[name]
    assert http["output_tokens"] == 6
