"""A replica that sends invalid data counts as one that broke off: no client gets the data, and other replicas go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from support.model_zoo import build_supported
from support.pretended_replicas import LOAD, SECRET, answering, client_of, streaming, streams_over, tokens
from support.pretended_replicas import line as piece_of

from radixkv import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from radixkv.cluster import ReplicaSet, ReplicaStreams, replica_app, replica_routes
from radixkv.cluster.describe import describe
from radixkv.cluster.records import Kind, RecordReader, encode_held, encode_load, encode_record
from radixkv.errors import ReplicasLostError
from radixkv.prompts import Prompt

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
BEAM_PARAMS = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
PROMPT = list(range(5, 45))


TOKEN = [0, "a", [9], -1.0, [[[9, -1.0, 1, "a"]]], None, None]


def line(*outputs: list[Any], finished: bool = False, **fields: Any) -> bytes:
    piece = {"outputs": outputs, "finished": finished, "num_cached_tokens": 0, "prompt_logprobs": None, **fields}
    return json.dumps(piece).encode() + b"\n"


def token_with(place: int, value: Any) -> bytes:
    """A piece with one token, in which this value replaces one field."""
    return line([*TOKEN[:place], value, *TOKEN[place + 1 :]])


def beams_with(**fields: Any) -> bytes:
    piece = {
        "beams": [[[*PROMPT, 9], [[[9, -1.0, 1, "a"]]], -1.0, "length", None]],
        "finished": True,
        "num_prompt_tokens": len(PROMPT),
        "num_cached_tokens": 0,
        **fields,
    }
    return json.dumps(piece).encode() + b"\n"


def beam_with(place: int, value: Any) -> bytes:
    beam: list[Any] = [[*PROMPT, 9], [[[9, -1.0, 1, "a"]]], -1.0, "length", None]
    beam[place] = value
    return beams_with(beams=[beam])


INVALID_PIECES = {
    "no JSON": b"<html>\n",
    "no object": b"[1, 2]\n",
    "no piece": b"{}\n",
    "an error without a kind": b'{"error": "odd"}\n',
    "an error beside an end": b'{"finished": true, "error": "odd"}\n',
    "an error of many kinds": b'{"error": "odd", "kind": ["odd"]}\n',
    "no outputs": b'{"finished": false}\n',
    "a sample beyond n": line([0, "a", [9], 0.0, None, None, None], [1, "a", [9], 0.0, None, None, None]),
    "a sample before the first": line([-1, "a", [9], 0.0, None, None, None]),
    "a sample with a fraction": line([0.0, "a", [9], 0.0, None, None, None]),
    "tokens as text": line([0, "a", ["9"], 0.0, None, None, None]),
    "a token below 0": line([0, "a", [-9], 0.0, None, None, None]),
    "no text": line([0, 1, [9], 0.0, None, None, None]),
    "no tokens": line([0, "a", "abc", 0.0, None, None, None]),
    "no end": line([0, "", [], 0.0, None, "abort", None], finished=True),
    "a sample that goes on after its end": line([*TOKEN[:5], "stop", None], TOKEN),
    "half of a surrogate pair": token_with(1, "\ud800"),
    "a token beyond the vocabulary": line([0, "a", [10**6], -1.0, [[[10**6, -1.0, 1, "a"]]], None, None]),
    "a sum as text": token_with(3, "low"),
    "no sum": token_with(3, None),
    "no log-probabilities": token_with(4, None),
    "too few of them": token_with(4, []),
    "those of another token": token_with(4, [[[8, -1.0, 1, "a"]]]),
    "those of a token beyond the vocabulary": token_with(4, [[[9, -1.0, 1, "a"], [10**6, -1.0, 2, "b"]]]),
    "a log-probability as text": token_with(4, [[[9, "-1.0", 1, "a"]]]),
    "a rank as text": token_with(4, [[[9, -1.0, "first", "a"]]]),
    "a number as a token's text": token_with(4, [[[9, -1.0, 1, 7]]]),
    "an unknown end": token_with(5, "tired"),
    "an end as a list": token_with(5, ["stop"]),
    "a reason that is an object": token_with(6, {}),
    "cached tokens as text": line(TOKEN, num_cached_tokens="none"),
    "more cached tokens than there are": line(TOKEN, num_cached_tokens=len(PROMPT) + 1),
    "the prompt's log-probabilities of other tokens": line(TOKEN, prompt_logprobs=[None, *[[[9, -1.0, 1, "a"]]] * 39]),
    "more tokens than were asked for": line([0, "a", [9] * 7, -1.0, [[[9, -1.0, 1, "a"]]] * 7, None, None]),
    "loaded tokens with a fraction": line(TOKEN, loaded_tokens={"disk": 1.5}),
    "a time below 0": line(TOKEN, loaded_tokens={"disk": 16}, load_seconds=-1),
    "drafts of a source without numbers": line(TOKEN, drafts={"tree": [1]}),
    "drafts below 0": line(TOKEN, drafts={"tree": [1, -1]}),
    "the prompt's log-probabilities of a part of it": line(TOKEN, prompt_logprobs=[None, [[6, -1.0, 1, "a"]]]),
}
INVALID_BEAMS = {
    "none": beams_with(beams=[]),
    "more than were asked for": beams_with(beams=[[[*PROMPT, 9], [[[9, -1.0, 1, "a"]]], -1.0, "length", None]] * 3),
    "another prompt's": beams_with(num_prompt_tokens=3),
    "a beam with another prompt": beam_with(0, [*PROMPT[1:], 9, 9]),
    "a token beyond the vocabulary": beam_with(0, [*PROMPT, 10**6]),
    "no tokens": beam_with(0, "abc"),
    "no log-probabilities": beam_with(1, None),
    "those of another token": beam_with(1, [[[8, -1.0, 1, "a"]]]),
    "a score as text": beam_with(2, "low"),
    "no end": beam_with(3, None),
    "an unknown end": beam_with(3, "tired"),
    "a reason that is an object": beam_with(4, {}),
    "cached tokens as text": beams_with(num_cached_tokens="none"),
}
INVALID_REFUSALS = {
    "no kind": b'{"error": "odd"}',
    "no time after which to come again": b'{"error": "full", "kind": "QueueFullError"}',
    "another time": b'{"error": "full", "kind": "QueueFullError", "retry_after": "later"}',
    "never": b'{"error": "full", "kind": "QueueFullError", "retry_after": 1e999}',
    "a time before": b'{"error": "full", "kind": "QueueFullError", "retry_after": -5}',
}
INVALID_ERRORS = {
    "many kinds": b'{"error": "odd", "kind": ["odd"]}',
    "a reason as a number": b'{"error": 7, "kind": "ValueError"}',
}
STATUSES = {**dict.fromkeys(INVALID_REFUSALS, 503), **dict.fromkeys(INVALID_ERRORS, 400)}


class InvalidAnswers(httpx.AsyncBaseTransport):
    """The first requests, so many of them, are answered with this body; later ones by the replica."""

    def __init__(self, app: Any, body: bytes, times: int, status: int) -> None:
        self._inner = httpx.ASGITransport(app)
        self._body = body
        self._status = status
        self._times = times
        self.hosts: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return await self._inner.handle_async_request(request)
        self.hosts.append(request.url.host)
        if len(self.hosts) > self._times:
            return await self._inner.handle_async_request(request)
        return httpx.Response(self._status, content=self._body)


def streams_with_invalid_answers(
    engine: AsyncLLM, body: bytes, times: int, *, status: int = 200, wait_seconds: float = 0.0
) -> tuple[ReplicaStreams, InvalidAnswers]:
    transport = InvalidAnswers(replica_app(engine, SECRET), body, times, status)
    clients = {name: httpx.AsyncClient(transport=transport, base_url=f"http://{name}") for name in "abcd"}
    return streams_over(clients, vocab_size=engine.loaded.vocab_size, wait_seconds=wait_seconds), transport


async def test_invalid_data_is_not_passed_on_and_another_replica_answers() -> None:
    llm = LLM(build_supported("llama"), num_blocks=40)
    (expected,) = llm.generate({"prompt_token_ids": PROMPT}, PARAMS, use_tqdm=False)
    async with AsyncLLM(llm) as engine:
        for name, body in {**INVALID_PIECES, **INVALID_REFUSALS, **INVALID_ERRORS}.items():
            streams, transport = streams_with_invalid_answers(engine, body, 2, status=STATUSES.get(name, 200))
            assert await tokens(streams, Prompt(PROMPT), PARAMS) == expected.outputs[0].token_ids, name
            assert len(transport.hosts) == len(set(transport.hosts)) == 3, name
        for name in ("no JSON", "no end"):  # nor is it requested for ever, while there is time to wait for another one
            streams, transport = streams_with_invalid_answers(engine, INVALID_PIECES[name], 100, wait_seconds=1000.0)
            with pytest.raises(ReplicasLostError, match="was lost by 4 replicas"):
                await tokens(streams, Prompt(PROMPT), PARAMS)
            assert len(transport.hosts) == 4, name


async def test_a_search_with_malformed_beams_starts_over() -> None:
    llm = LLM(build_supported("llama"), num_blocks=40)
    (expected,) = llm.beam_search([{"prompt_token_ids": PROMPT}], BEAM_PARAMS)
    async with AsyncLLM(llm) as engine:
        for name, body in INVALID_BEAMS.items():
            streams, transport = streams_with_invalid_answers(engine, body, 1)
            found = await streams.beam_search(Prompt(PROMPT), BEAM_PARAMS, "one")
            assert [beam.tokens for beam in found.sequences] == [beam.tokens for beam in expected.sequences], name
            assert len(transport.hosts) == 2, name


async def test_a_line_may_arrive_in_any_pieces_and_empty_lines_are_ignored() -> None:
    one, two, last = piece_of(1), piece_of(2), piece_of(3, "stop")
    pieces = [b"\n", one[:4], b"", one[4:], b"\n\n" + two[:1], two[1:] + last[:9], last[9:]]
    streams = streams_over({"a": client_of(answering(*pieces))})
    assert await tokens(streams, Prompt(PROMPT), replace(PARAMS, logprobs=None)) == [1, 2, 3]


async def test_a_line_without_an_end_is_not_buffered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The ingress used to collect it until its memory was exhausted."""
    monkeypatch.setattr("radixkv.cluster.answer_lines._MAX_LINE_BYTES", 1000)
    monkeypatch.setattr("radixkv.cluster.losses._MAX_LOSSES", 1)
    num_sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_sent
        while num_sent < 10**6:
            num_sent += 1
            yield b"x" * 100

    streams = streams_over({"a": client_of(streaming(endless))})
    with pytest.raises(ReplicasLostError):
        await tokens(streams, Prompt(PROMPT), PARAMS)
    assert num_sent == 11
    assert "a: it sent a line of more than 1000 bytes" in caplog.text


async def test_a_description_that_failed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the model's files could not be read the first time, the replica never joined."""
    failures = iter([OSError("planted")])

    async def describe_later(*arguments: Any) -> Any:
        for failure in failures:
            raise failure
        return await describe(*arguments)

    monkeypatch.setattr(replica_routes, "describe", describe_later)
    async with AsyncLLM(LLM(build_supported("llama"), num_blocks=40)) as engine:
        transport = httpx.ASGITransport(replica_app(engine, SECRET), raise_app_exceptions=False)
        headers = {"Authorization": f"Bearer {SECRET}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://a", headers=headers) as client:
            statuses = [(await client.get("/description")).status_code for _ in range(2)]
    assert statuses == [500, 200]


async def test_a_server_that_is_not_a_replica_leaves_the_set_as_it_was() -> None:
    """Otherwise no other replica would be of the same kind as this first one."""
    load = encode_load(LOAD)
    held = b"".join(encode_held(np.zeros(0, np.uint64)))
    async with AsyncLLM(LLM(build_supported("llama"), num_blocks=40)) as engine:
        valid = (await describe(engine, "one", 0.0)).as_json()
    invalid: list[tuple[Any, bytes, str]] = [
        ([], b"", "TypeError"),
        ({**valid, "identity": []}, held + load, "identity: expected an object"),
        ({**valid, "instance": []}, held + load, "instance: expected a name"),
        ({**valid, "age": -1.0}, held + load, "age: expected seconds, got -1.0"),
        ({**valid, "capacity": {}}, held + load, "max_model_len: expected a value of type int, got None"),
        ({**valid, "capacity": []}, held + load, "capacity: expected an object"),
        ({**valid, "chat_template": {"default": 7}}, held + load, "chat_template: expected a text, texts by name"),
        ({**valid, "identity": {"block_size": 16}}, held + load, "version: expected"),
        (
            {**valid, "identity": {**valid["identity"], "block_size": 0}},
            held + load,
            "block_size: expected at least 1, got 0",
        ),
        ({**valid, "identity": {**valid["identity"], "model": "another"}}, b"", "expected events, and they ended"),
        (
            {**valid, "identity": {**valid["identity"], "model": "another"}},
            encode_record(Kind.CLEARED),
            "expected HELD as its first record",
        ),
    ]
    answers = {str(number): (described, events) for number, (described, events, _) in enumerate(invalid)}
    answers["valid"] = valid, held + load

    def connect(url: str) -> httpx.AsyncClient:
        described, events = answers[url]

        async def body() -> AsyncIterator[bytes]:
            yield events
            if url == "valid":
                await asyncio.Event().wait()

        async def answer(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/description":
                return httpx.Response(200, json=described)
            return await streaming(body)(request)

        return httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://replica")

    replicas = ReplicaSet(SECRET, connect=connect)
    for number, (_, _, message) in enumerate(invalid):
        with pytest.raises(ConnectionError, match=message):
            await replicas.add("invalid", str(number))
        assert (replicas.names, replicas.generations.newest) == ([], None)
    await replicas.add("valid", "valid")
    assert replicas.generations.newest is not None
    assert replicas.generations.newest.as_json() | {"age": valid["age"]} == valid
    await replicas.close()


def test_a_record_without_an_end_is_not_buffered() -> None:
    with pytest.raises(ValueError, match="expected records of at most 16777216 bytes, got one of 4294967295"):
        list(RecordReader().read(b"\x01\xff\xff\xff\xff"))
