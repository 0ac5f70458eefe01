"""A replica that sends what it should not is one that broke off: nobody gets it, and others go on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from support.model_zoo import build_supported

from radixkv import LLM, AsyncLLM, SamplingParams
from radixkv.cluster import ReplicaSet, ReplicaStreams, replica_app
from radixkv.cluster.feed import RecordReader
from radixkv.errors import ReplicasLostError
from radixkv.prompts import Prompt
from radixkv.routing import Router

SECRET = "a secret of the replicas"
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = list(range(5, 45))


def line(*outputs: list[Any], finished: bool = False) -> bytes:
    piece = {"outputs": outputs, "finished": finished, "num_cached_tokens": 0, "prompt_logprobs": None}
    return json.dumps(piece).encode() + b"\n"


LIES = {
    "no JSON": b"<html>\n",
    "no object": b"[1, 2]\n",
    "no piece": b"{}\n",
    "an error without a kind": b'{"error": "odd"}\n',
    "no outputs": b'{"finished": false}\n',
    "a sample that nobody asked for": line([0, "a", [9], 0.0, None, None, None], [1, "a", [9], 0.0, None, None, None]),
    "a sample before the first": line([-1, "a", [9], 0.0, None, None, None]),
    "no tokens": line([0, "a", "abc", 0.0, None, None, None]),
    "no end": line([0, "", [], 0.0, None, "abort", None], finished=True),
}


class Lying(httpx.AsyncBaseTransport):
    """Answers requests with a body that is no answer, as often as it is told; then tells the truth."""

    def __init__(self, app: Any, body: bytes, times: int) -> None:
        self._inner = httpx.ASGITransport(app)
        self._body = body
        self._times = times
        self.asked: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return await self._inner.handle_async_request(request)
        self.asked.append(request.url.host)
        if len(self.asked) > self._times:
            return await self._inner.handle_async_request(request)
        return httpx.Response(200, content=self._body)


def lying(engine: AsyncLLM, body: bytes, times: int) -> tuple[ReplicaStreams, Lying]:
    router, transport = Router(16), Lying(replica_app(engine, SECRET), body, times)
    for name in "abcd":
        router.add(name)
    clients = {name: httpx.AsyncClient(transport=transport, base_url=f"http://{name}") for name in "abcd"}
    return ReplicaStreams(router, clients, SECRET), transport


async def collect(streams: ReplicaStreams) -> list[int]:
    deltas = streams.generate(Prompt(PROMPT), PARAMS, "one")
    return [token_id async for delta in deltas for token_id in delta.outputs[0].token_ids]


def test_a_lie_is_not_passed_on_and_another_replica_answers() -> None:
    llm = LLM(build_supported("llama"), num_blocks=40)
    (expected,) = llm.generate({"prompt_token_ids": PROMPT}, PARAMS, use_tqdm=False)

    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            for name, body in LIES.items():
                streams, transport = lying(engine, body, 2)
                assert await collect(streams) == expected.outputs[0].token_ids, name
                assert len(transport.asked) == len(set(transport.asked)) == 3, name
            streams, _ = lying(engine, LIES["no JSON"], 100)
            with pytest.raises(ReplicasLostError, match="was lost by 4 replicas"):
                await collect(streams)

    asyncio.run(main())


def test_a_replica_that_describes_nothing_leaves_the_set_as_it_was() -> None:
    """Else no other replica would be of the same kind as this first one."""

    async def main() -> None:
        async with AsyncLLM(LLM(build_supported("llama"), num_blocks=40)) as engine:

            def connect(url: str) -> httpx.AsyncClient:
                def describe(request: httpx.Request) -> httpx.Response:
                    return httpx.Response(200, json={"instance": "x", "identity": {"block_size": 0}, "capacity": {}})

                honest = httpx.ASGITransport(replica_app(engine, SECRET))
                transport = honest if "honest" in url else httpx.MockTransport(describe)
                return httpx.AsyncClient(transport=transport, base_url=url)

            replicas = ReplicaSet(SECRET, connect=connect)
            with pytest.raises(ConnectionError, match=r"it describes no replica: .*block_size"):
                await replicas.add("liar", "http://liar")
            assert (replicas.names, replicas.description) == ([], None)

    asyncio.run(main())


def test_a_record_that_has_no_end_is_not_collected() -> None:
    with pytest.raises(ValueError, match="expected records of at most 16777216 bytes, got one of 4294967295"):
        list(RecordReader().read(b"\x01\xff\xff\xff\xff"))
