"""A stream is the same whenever its replica breaks off, and however often; what cannot be mended is a clear error."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from support.held_steps import HeldSteps
from support.model_zoo import build_supported
from support.pretended_replicas import GREEDY, SECRET, Cluster, answering, streams_over, until
from support.pretended_replicas import client_of as pretended

from radixkv import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    CompletionOutput,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from radixkv.cluster import ReplicaStreams, replica_app
from radixkv.cluster.wire import (
    decode_pin,
    decode_prompts,
    decode_selection,
    decode_shares,
    encode_delta,
    encode_pin,
    encode_prompts,
    encode_shares,
)
from radixkv.errors import ReplicasLostError
from radixkv.outputs import RequestMetrics
from radixkv.prompts import Prompt, as_prompts
from radixkv.routing import prompt_hashes
from radixkv.scheduling.tenant_share import TenantShare

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
CASES = {
    "stop": SamplingParams(temperature=0, max_tokens=12, stop=["the capital of", "is the c"], logprobs=1),
    "samples": SamplingParams(
        n=2, seed=3, max_tokens=5, prompt_logprobs=0, frequency_penalty=0.5, logit_bias={11: -3.0}
    ),
    "schema": SamplingParams(seed=1, max_tokens=12, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
}


class Breaking(httpx.AsyncBaseTransport):
    """An application whose answers break off after so many bytes, one number for each request; None: not at all."""

    def __init__(self, app: Any, cuts: Iterator[int | None]) -> None:
        self._inner = httpx.ASGITransport(app)
        self._cuts = cuts
        self.num_requests = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return await self._inner.handle_async_request(request)
        self.num_requests += 1
        cut = next(self._cuts)
        if cut is None:
            return await self._inner.handle_async_request(request)
        if cut < 0:
            raise httpx.ConnectError("planted")
        response = await self._inner.handle_async_request(request)
        body = await response.aread()
        assert response.status_code == 200
        return await answering(body[:cut], breaks=True)(request)


def replicas(llm: AsyncLLM, cuts: Sequence[int | None], secret: str = SECRET) -> tuple[ReplicaStreams, Breaking]:
    """Four names for one engine."""
    transport = Breaking(replica_app(llm, SECRET), iter([*cuts, *[None] * 100]))
    clients = {name: httpx.AsyncClient(transport=transport, base_url=f"http://{name}") for name in "abcd"}
    return streams_over(clients, secret), transport


def client_of(llm: AsyncLLM, name: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(replica_app(llm, SECRET)), base_url=f"http://{name}")


async def collect(streams: ReplicaStreams, prompt: Prompt, params: SamplingParams) -> list[CompletionOutput]:
    parts: dict[int, CompletionOutput] = {}
    async for delta in streams.generate(prompt, params, "one"):
        for part in delta.outputs:
            whole = parts.setdefault(part.index, CompletionOutput(part.index, "", [], None, [], None, None))
            whole.text += part.text
            whole.token_ids += part.token_ids
            whole.logprobs = (whole.logprobs or []) + (part.logprobs or [])
            whole.finish_reason, whole.stop_reason = part.finish_reason, part.stop_reason
    return [parts[index] for index in sorted(parts)]


def answers(outputs: list[CompletionOutput]) -> list[tuple[Any, ...]]:
    return [
        (o.text, o.token_ids, o.finish_reason, o.stop_reason, [list(entry) for entry in o.logprobs or []])
        for o in outputs
    ]


@pytest.mark.parametrize("case", CASES)
async def test_it_is_the_same_wherever_replicas_break_off(request: pytest.FixtureRequest, case: str) -> None:
    llm: LLM = request.getfixturevalue("llm" if case == "schema" else "default_llm")
    params = CASES[case]
    (expected,) = llm.generate("The three largest cities of France are", params, use_tqdm=False)
    (prompt,) = as_prompts("The three largest cities of France are", llm.engine.loaded)
    async with AsyncLLM(llm) as engine:
        for cuts in ([0], [400], [250, -1, 1]):
            streams, transport = replicas(engine, cuts)
            assert answers(await collect(streams, prompt, params)) == answers(expected.outputs)
            assert transport.num_requests == 1 + len(cuts)
            assert all(not replica.waiting and not replica.queued for replica in streams.router._replicas.values())


async def test_attempts_are_bounded(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    (prompt,) = as_prompts("One, two,", llm.engine.loaded)
    async with AsyncLLM(llm) as engine:
        streams, transport = replicas(engine, [50] * 10)
        with pytest.raises(ReplicasLostError, match=r"request 'one' was lost by 4 replicas$"):
            await collect(streams, prompt, SamplingParams(max_tokens=4))
        assert transport.num_requests == 4
        # What the replicas are called, and what happened to them, is for who runs them.
        assert re.search("request 'one' is given up: [abcd]: .*planted", caplog.text)


async def test_without_the_secret_nothing_is_answered(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    (prompt,) = as_prompts("One, two,", llm.engine.loaded)
    async with AsyncLLM(llm) as engine:
        streams, _ = replicas(engine, [], secret="another secret, as long")
        num_steps = engine.stats.num_steps
        with pytest.raises(ReplicasLostError, match=r"was lost by 4 replicas$"):
            await collect(streams, prompt, SamplingParams(max_tokens=4))
        assert re.search("401 .*secret is missing or wrong", caplog.text)
        assert engine.stats.num_steps == num_steps
        with pytest.raises(ValueError, match="secret: expected at least 16 printable ASCII characters"):
            replica_app(engine, "short")


async def test_an_ingress_that_leaves_while_it_sends_a_request_is_no_error_of_the_replica(llm: LLM) -> None:
    """A client that left an ingress during a long prompt's way to a replica was a traceback in the replica's log."""
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {SECRET}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b"", "headers": headers}
    async with AsyncLLM(llm) as engine:
        await replica_app(engine, SECRET)(scope, receive, send)
        assert engine.num_slots_taken == 0
    assert sent[0]["status"] == 400


async def test_what_any_replica_would_refuse_is_sent_to_one(llm: LLM) -> None:
    async with AsyncLLM(llm) as engine:
        streams, transport = replicas(engine, [])
        with pytest.raises(ValueError, match="prompt_token_ids: 49152 is outside the vocabulary"):
            await collect(streams, Prompt([49152]), SamplingParams(max_tokens=4))
        assert transport.num_requests == 1


async def test_numpy_s_numbers_and_any_collections_are_taken_as_an_engine_takes_them() -> None:
    """They used to fail where they were written as JSON."""
    llm = LLM(build_supported("llama"), num_blocks=40)
    prompt = Prompt(np.array([5, 6, 7]), prediction=list(np.array([8])))  # type: ignore[arg-type]
    params = SamplingParams(
        temperature=0,
        max_tokens=6,
        logit_bias={np.int64(9): np.float32(2.5)},  # type: ignore[dict-item]
        stop_token_ids={np.int64(3)},  # type: ignore[arg-type]
    )
    params.min_p = np.float32(0.5)  # type: ignore[assignment]
    begun = CompletionOutput(0, "", list(np.array([4])), np.float32(0.5))  # type: ignore[arg-type]
    expected = llm.generate({"prompt_token_ids": [5, 6, 7], "resume": [begun]}, params, use_tqdm=False)
    beams = llm.beam_search([{"prompt_token_ids": [5, 6, 7]}], BeamSearchParams(beam_width=2, max_tokens=4))
    async with AsyncLLM(llm) as engine:
        streams, _ = replicas(engine, [])
        outputs: list[RequestOutput] = []
        options: Any = {"priority": np.int64(1)}
        async for output in streams.generate(replace(prompt, resume=[begun]), params, "one", **options):
            outputs.append(output)
        token_ids = [token_id for output in outputs for token_id in output.outputs[0].token_ids]
        assert token_ids == expected[0].outputs[0].token_ids
        assert json.dumps(outputs[0].prompt_token_ids) == "[5, 6, 7]"
        search = BeamSearchParams(beam_width=2, max_tokens=4)
        found = await streams.beam_search(prompt, search, "two", **options)
        assert [beam.tokens for beam in found.sequences] == [beam.tokens for beam in beams[0].sequences]


@pytest.mark.parametrize(
    ("token_ids", "temperature", "expected"),
    [
        ([5, 1.5], 0.0, "prompt_token_ids: expected whole numbers, got [5, 1.5]"),
        ([5, True], 0.0, "prompt_token_ids: expected whole numbers, got [5, True]"),
        ([5], "hot", "temperature: expected a number, got 'hot'"),
    ],
)
def test_what_an_engine_would_refuse_is_sent_to_no_replica(token_ids: Any, temperature: Any, expected: str) -> None:
    params = SamplingParams(max_tokens=4)
    params.temperature = temperature
    with pytest.raises(TypeError, match=f"^{re.escape(expected)}$"):
        asyncio.run(collect(streams_over({}), Prompt(token_ids), params))


def test_pins_explanations_and_shares_may_have_numpy_s_numbers() -> None:
    ids: Any = np.array([5, 6, 7])
    ttl: Any = np.float32(0.5)
    assert decode_pin(encode_pin("ann", "", ids, ttl)) == ("ann", "", [5, 6, 7], 0.5)
    assert decode_prompts(encode_prompts([Prompt(ids)], "ann")) == ([Prompt([5, 6, 7])], "ann")
    share = TenantShare(weight=np.float32(0.5), max_num_seqs=np.int64(3))  # type: ignore[arg-type]
    assert decode_shares(encode_shares({"ann": share})) == {"ann": share}


@pytest.mark.parametrize("body", [b"{}", b'{"name": null}', b'{"derived": true}', b"[]"])
def test_a_selection_is_not_completed_with_defaults_which_mean_everything(body: bytes) -> None:
    with pytest.raises((KeyError, TypeError)):
        decode_selection(body)


async def stop_after_some_steps(engine: AsyncLLM, steps: HeldSteps) -> None:
    """Shut the engine down after some steps: however fast it is, its request has not ended by then."""
    steps.allow(3)
    await until(lambda: steps.is_holding)  # or the shutdown could be taken out of the queue before it is seen there
    stopping = asyncio.ensure_future(engine.shutdown(grace_seconds=0))
    await until(engine._engine_thread._calls.qsize)
    steps.allow_all()
    await stopping


async def test_a_drained_replica_s_stream_goes_on_elsewhere() -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (expected,) = LLM(build_supported("llama"), num_blocks=40).generate(
        {"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False
    )
    async with (
        AsyncLLM(build_supported("llama"), num_blocks=40) as first,
        AsyncLLM(build_supported("llama"), num_blocks=40) as second,
    ):
        streams = streams_over({"first": client_of(first, "first"), "second": client_of(second, "second")})
        steps = await first.call(HeldSteps)
        answer = asyncio.ensure_future(collect(streams, Prompt([5, 6, 7]), params))
        await stop_after_some_steps(first, steps)
        (output,) = await answer
        assert output.token_ids == expected.outputs[0].token_ids
        assert output.finish_reason == "length"


async def test_a_stopped_replica_s_beam_search_is_begun_anew_elsewhere() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=15, ignore_eos=True)
    (expected,) = LLM(build_supported("llama"), num_blocks=60).beam_search([{"prompt_token_ids": [5, 6, 7]}], params)
    async with (
        AsyncLLM(build_supported("llama"), num_blocks=60) as first,
        AsyncLLM(build_supported("llama"), num_blocks=60) as second,
    ):
        streams = streams_over({"first": client_of(first, "first"), "second": client_of(second, "second")})
        search = streams.beam_search(Prompt([5, 6, 7]), params, "one")
        steps = await first.call(HeldSteps)
        answer = asyncio.ensure_future(search)
        await stop_after_some_steps(first, steps)
        assert [beam.tokens for beam in (await answer).sequences] == [beam.tokens for beam in expected.sequences]


async def test_the_end_of_a_sample_is_passed_on_although_no_token_comes_with_it() -> None:
    """A replica that computed a long prompt in parts sent it before the other sample's next token: it was lost."""
    ended = CompletionOutput(0, "a", [7], 0.0, finish_reason="stop")
    begun = Prompt([5, 6], resume=[ended, CompletionOutput(1, "b", [8], 0.0)])
    pieces = [
        RequestOutput("one", None, [5, 6], None, outputs, finished, 0, RequestMetrics(0.0))
        for outputs, finished in [
            ([replace(ended, text="", token_ids=[])], False),
            ([CompletionOutput(1, "c", [9], 0.0, finish_reason="length")], True),
        ]
    ]
    streams = streams_over({"a": pretended(answering(*map(encode_delta, pieces)))})
    outputs = await collect(streams, begun, SamplingParams(n=2, seed=1, max_tokens=2))
    assert [(output.token_ids, output.finish_reason) for output in outputs] == [([], "stop"), ([9], "length")]


async def test_what_was_begun_elsewhere_needs_its_seed_and_every_sample(llm: LLM) -> None:
    (prompt,) = as_prompts("One, two,", llm.engine.loaded)
    begun = replace(prompt, resume=[CompletionOutput(0, "", [7], 0.0)])
    async with AsyncLLM(llm) as engine:
        streams, transport = replicas(engine, [])
        with pytest.raises(ValueError, match="resume: expected params with a seed, or greedy ones"):
            await collect(streams, begun, SamplingParams(max_tokens=4))
        with pytest.raises(
            ValueError, match=r"resume: expected one output for each of n=2 samples, got those of \[0\]"
        ):
            await collect(streams, begun, SamplingParams(max_tokens=4, seed=1, n=2))
        assert transport.num_requests == 0


@pytest.mark.parametrize(
    ("prompt", "params", "caching", "expected"),
    [
        (Prompt([1] * 65), GREEDY, True, [4, 0]),
        (Prompt([1] * 65, read_cache=False), GREEDY, True, [2, 2]),
        (Prompt([1] * 65, write_cache=False), GREEDY, True, [2, 2]),
        (Prompt([1] * 65), replace(GREEDY, prompt_logprobs=0), True, [2, 2]),
        (Prompt([1] * 65), GREEDY, False, [2, 2]),
    ],
    ids=["cached", "not read", "not written", "prompt_logprobs", "without a cache"],
)
async def test_equal_prompts_go_to_one_replica_only_if_it_computes_them_once(
    prompt: Prompt, params: SamplingParams, caching: bool, expected: list[int]
) -> None:
    cluster = Cluster()
    for name in "ab":
        cluster.identities[f"http://{name}"] = {"enable_prefix_caching": caching}
    together = await cluster.up(*"ab")
    tasks = []
    for number in range(4):
        stream = together.streams.generate(prompt, params, str(number))
        tasks.append(asyncio.ensure_future(anext(stream)))
        await until(lambda number=number: sum(map(together.streams.num_streams, "ab")) == number + 1)
    assert [together.streams.num_streams(name) for name in "ab"] == expected
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await together.close()


async def test_a_prompt_whose_log_probabilities_have_come_goes_on_where_it_is_cached() -> None:
    cluster = Cluster()
    together = await cluster.up(*"ab")
    held = prompt_hashes([1] * 64, "", 16)
    together.streams.router.stored("b", held)
    begun = Prompt([1] * 65, resume=[CompletionOutput(0, "x", [2], 0.0)])
    stream = together.streams.generate(begun, replace(GREEDY, prompt_logprobs=0), "one")
    task = asyncio.ensure_future(anext(stream))
    await until(lambda: sum(map(together.streams.num_streams, "ab")))
    assert [together.streams.num_streams(name) for name in "ab"] == [0, 1]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await together.close()
