"""The metrics match the requests that were made."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.in_process_server import make_client
from support.server_process import ServerProcess

from radixkv import LLM, AsyncLLM
from radixkv.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestMetrics, RequestOutput
from radixkv.server import time_limits
from radixkv.server.operation.metrics import RequestTimer, ServerMetrics

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana_dashboard.json"


def test_metrics_count_what_happened(server: ServerProcess, http: httpx.Client) -> None:
    before = server.metrics()

    def change(name: str) -> float:
        return server.metrics()[name] - before.get(name, 0)

    body = {"prompt": "Tell me of the sea, and of ships. " * 10, "max_tokens": 9, "ignore_eos": True}
    usages = [http.post("/v1/completions", json={**body, "n": n}).json()["usage"] for n in (1, 4)]
    num_prompt = usages[0]["prompt_tokens"]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached == [0, num_prompt - 1]
    assert change("radixkv:prefix_cache_queries_total") == 2 * num_prompt
    assert change("radixkv:prefix_cache_hits_total") == num_prompt - 1
    assert change("radixkv:prompt_tokens_computed_total") == num_prompt + 1
    assert change("radixkv:prompt_tokens_total") == 2 * num_prompt
    assert change("radixkv:generation_tokens_total") == 9 + 4 * 9
    assert change('radixkv:request_success_total{finished_reason="length"}') == 5
    assert change("radixkv:forked_sequences_total") == 3
    assert change("radixkv:copied_blocks_total") > 0
    assert change("radixkv:time_to_first_token_seconds_count") == 2
    assert change("radixkv:e2e_request_latency_seconds_count") == 2
    assert 8 <= change("radixkv:inter_token_latency_seconds_count") <= 16
    assert change("radixkv:num_steps_total") == change("radixkv:iteration_tokens_count") == 18
    assert change("radixkv:iteration_tokens_sum") == (num_prompt + 8) + (1 + 4 * 8)
    assert change("radixkv:iteration_sequences_sum") == 9 + (1 + 4 * 8)
    after = server.metrics()
    states = {state: after[f'radixkv:kv_cache_blocks{{state="{state}"}}'] for state in ("free", "held", "evictable")}
    assert sum(states.values()) == 2000
    assert states["held"] == after["radixkv:kv_cache_usage_perc"] == 0
    assert after["radixkv:num_requests_running"] == after["radixkv:num_requests_waiting"] == 0
    assert change("radixkv:num_preemptions_total") == change("radixkv:evicted_blocks_total") == 0
    # Of a search's beams, only those that are returned count.
    http.post("/v1/completions", json={**body, "use_beam_search": True, "n": 2, "beam_width": 4}).raise_for_status()
    assert change('radixkv:request_success_total{finished_reason="length"}') == 7
    assert change("radixkv:e2e_request_latency_seconds_count") == 3
    # A search that finds fewer than were asked for is complete.
    few = {"use_beam_search": True, "n": 4, "structured_outputs": {"choice": ["a", "b"]}}
    http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 9, **few}).raise_for_status()
    assert change('radixkv:request_success_total{finished_reason="stop"}') == 2
    assert change("radixkv:e2e_request_latency_seconds_count") == 4
    aborted = 'radixkv:request_success_total{finished_reason="abort"}'
    assert server.metrics().get(aborted) == before.get(aborted)


def test_the_dashboard_queries_metrics_that_exist(server: ServerProcess) -> None:
    found = {name.partition("{")[0] for name in server.metrics()}
    expressions = [
        target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel.get("targets", [])
    ]
    assert len(expressions) >= 10
    for expression in expressions:
        words = expression.replace("{", " ").replace("[", " ").replace("(", " ").replace(")", " ").split()
        names = [word for word in words if word.startswith("radixkv:")]
        assert names
        assert set(names) <= found


async def test_all_times_of_a_request_count_from_its_arrival(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They left out the wait for the tokenizer and for grammars to be compiled, which others' requests may make long."""
    arrivals: list[float] = []

    def note_timer(metrics: Any, arrival: float) -> RequestTimer:
        arrivals.append(arrival)
        return RequestTimer(metrics, arrival)

    monkeypatch.setattr(time_limits, "RequestTimer", note_timer)
    async with AsyncLLM(llm) as engine, make_client(engine) as client:
        asked: list[float] = []
        run_tokenizer, submit = engine.run_tokenizer, engine.submit

        async def note_and_run(*arguments: Any, **options: Any) -> Any:
            asked.append(time.monotonic())
            return await run_tokenizer(*arguments, **options)

        async def submit_and_note(*arguments: Any, **options: Any) -> Any:
            (stream,) = await submit(*arguments, **options)
            assert stream.request is not None
            arrivals.append(stream.request.metrics.arrival_time)
            return [stream]

        monkeypatch.setattr(engine, "run_tokenizer", note_and_run)
        monkeypatch.setattr(engine, "submit", submit_and_note)
        messages = [{"role": "user", "content": "Hi"}]
        for path, body in (
            ("/v1/completions", {"prompt": "Hi"}),
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/messages", {"model": "model", "messages": messages}),
        ):
            arrivals.clear()
            asked.clear()
            (await client.post(path, json={**body, "max_tokens": 1})).raise_for_status()
            of_timer, of_request = arrivals
            assert of_timer == of_request <= asked[0]
        async for output in engine.generate("Hi"):
            assert output.metrics.arrival_time <= asked[-1]


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [4], [2, 2], [1, 3], [3, 1]])
def test_every_gap_between_tokens_counts(llm: LLM, sizes: list[int]) -> None:
    """Those within the first delta were left out."""
    metrics = ServerMetrics(AsyncLLM(llm))
    first_token_time = time.monotonic() - 5
    timer = RequestTimer(metrics, first_token_time - 1)
    timer.expect(2)
    for size in sizes:
        choices = [CompletionOutput(choice, "", [7] * size) for choice in range(2)]
        times = RequestMetrics(first_token_time - 1, first_token_time=first_token_time)
        timer.observe(RequestOutput("request", None, [5], None, choices, False, 0, times))
    value = metrics.registry.get_sample_value
    assert value("radixkv:inter_token_latency_seconds_count") == 3
    total = value("radixkv:inter_token_latency_seconds_sum")
    assert total is not None
    assert total >= (5 if sizes[0] > 1 else 0)  # from the first token on


@pytest.mark.parametrize("num_complete", [0, 1])
def test_an_aborted_beam_search_counts_as_aborted(llm: LLM, num_complete: int) -> None:
    """Without a complete beam it was not counted at all, and complete beams counted as finished."""
    metrics = ServerMetrics(AsyncLLM(llm))
    timer = RequestTimer(metrics, time.monotonic())
    timer.expect(2)
    beams = [BeamSearchSequence([7, 8], [], 0.0, None, "length")] * num_complete
    timer.observe(BeamSearchOutput(beams, 1, 0, RequestMetrics(time.monotonic()), aborted=True))
    timer.end()
    value = metrics.registry.get_sample_value
    assert value("radixkv:request_success_total", {"finished_reason": "abort"}) == 2
    assert value("radixkv:request_success_total", {"finished_reason": "length"}) is None
    assert value("radixkv:e2e_request_latency_seconds_count") == 1
