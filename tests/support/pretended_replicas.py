"""Replicas that are functions: each answers what a test says, hangs, or cannot be reached."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import asdict
from typing import Any

import httpx
from support.time_limit import HANGING

from radixkv import SamplingParams, __version__
from radixkv.cluster import ClusterLLM, ReplicaSet, ReplicaStreams
from radixkv.cluster.load import ReplicaLoad
from radixkv.cluster.records import Kind, encode_load, encode_record
from radixkv.engine.clearing import Cleared
from radixkv.model.text_interface import TextInterface
from radixkv.prompts import Prompt
from radixkv.routing import Router

SECRET = "a secret of the replicas"
PROMPT = Prompt([1, 2, 3])
GREEDY = SamplingParams(temperature=0, max_tokens=10)
IDENTITY = {
    "version": __version__,
    "tokenizer": "none",
    "model": "tiny",
    "weights": "none",
    "dtype": "float32",
    "model_length": 100,
    "rope_factors": "",
    "vocab_size": 50,
    "eos_token_ids": [],
    "sampling_defaults": {},
    "chat_template": "none",
    "block_size": 16,
    "block_bytes": 1024,
    "enable_prefix_caching": True,
    "quantised_bytes": 0,
}
CAPACITY = {"max_model_len": 100, "max_num_seqs": 4, "max_num_batched_tokens": 100}
LOAD = ReplicaLoad()
Handler = Callable[[httpx.Request], Coroutine[None, None, httpx.Response]]


def line(token_id: int, finish_reason: str | None = None) -> bytes:
    output = [0, "x", [token_id], None, None, finish_reason, None]
    piece = {
        "outputs": [output],
        "finished": finish_reason is not None,
        "num_cached_tokens": 0,
        "prompt_logprobs": None,
    }
    return json.dumps(piece).encode() + b"\n"


class Body(httpx.AsyncByteStream):
    def __init__(self, parts: Callable[[], AsyncIterator[bytes]]) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._parts():
            yield part


def load_record(**fields: Any) -> bytes:
    """A load of which some fields are others, perhaps impossible ones."""
    return encode_record(Kind.LOAD, json.dumps({**asdict(LOAD), **fields}).encode())


def client_of(handler: Handler, url: str = "http://replica") -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url=url)


def refusal(kind: str, status: int = 503) -> httpx.Response:
    return httpx.Response(status, json={"error": "no room", "kind": kind, "retry_after": 1})


def streaming(body: Callable[[], AsyncIterator[bytes]]) -> Handler:
    """Answers each request with a body of its own."""

    async def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Body(body))

    return handler


def answering(*parts: bytes, breaks: bool = False) -> Handler:
    """Answers each request with the same body, whose connection may break at its end."""

    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            yield part
        if breaks:
            raise httpx.ReadError("planted")

    return streaming(body)


def streams_over(clients: Mapping[str, httpx.AsyncClient], secret: str = SECRET, **options: Any) -> ReplicaStreams:
    """Streams over replicas that are up, by their names."""
    router = Router(16)
    for name in clients:
        router.add(name)
    return ReplicaStreams(router, clients, secret, **options)


async def tokens(
    streams: ReplicaStreams,
    prompt: Prompt = PROMPT,
    params: SamplingParams = GREEDY,
    request_id: str = "one",
    **options: Any,
) -> list[int]:
    """The tokens that answer a prompt."""
    deltas = streams.generate(prompt, params, request_id, **options)
    return [token_id async for delta in deltas for token_id in delta.outputs[0].token_ids]


async def until(condition: Callable[[], Any]) -> None:
    """Wait for a condition with pauses: another process may bring it about, or the end of the test."""
    async with asyncio.timeout(HANGING):
        while not condition():
            await asyncio.sleep(0.001)


class Cluster:
    """Replicas by their urls: each is up until it is told to hang, and is not heard from after that."""

    def __init__(self) -> None:
        self.made: list[httpx.AsyncClient] = []
        self.hung: set[str] = set()
        self.timeouts: list[float] = []
        self.answers: dict[str, Handler] = {}
        self.events: dict[str, list[bytes]] = {}
        self.identities: dict[str, dict[str, Any]] = {}
        self.capacities: dict[str, dict[str, int]] = {}

    def connect(self, url: str) -> httpx.AsyncClient:
        async def events() -> AsyncIterator[bytes]:
            for record in self.events.get(url, [encode_record(Kind.HELD), encode_load(LOAD)]):
                yield record
            await until(lambda: url in self.hung)
            raise TimeoutError("planted")

        async def handler(request: httpx.Request) -> httpx.Response:
            if request.url.path in self.answers:
                return await self.answers[request.url.path](request)
            if request.url.path == "/description":
                self.timeouts.append(request.extensions["timeout"]["read"])
                if url in self.hung:
                    await asyncio.Event().wait()
                identity = {**IDENTITY, **self.identities.get(url, {})}
                capacity = {**CAPACITY, **self.capacities.get(url, {})}
                description = {
                    "instance": url,
                    "age": 0.0,
                    "identity": identity,
                    "capacity": capacity,
                    "chat_template": None,
                }
                return httpx.Response(200, json=description)
            if request.url.path == "/events":
                return httpx.Response(200, stream=Body(events))
            if request.url.path == "/clear" and url == "http://broken":
                return httpx.Response(500)
            if request.url.path == "/clear":
                return httpx.Response(200, json=Cleared(1, 0, 0, 0)._asdict())
            await asyncio.Event().wait()
            raise AssertionError

        self.made.append(client_of(handler, url))
        return self.made[-1]

    def replicas(self) -> ReplicaSet:
        return ReplicaSet(SECRET, connect=self.connect)

    async def up(self, *names: str) -> ReplicaSet:
        """A set of replicas that are up, each at a url with its name."""
        replicas = self.replicas()
        for name in names:
            await replicas.add(name, f"http://{name}")
        return replicas


def llm_of(replicas: ReplicaSet, max_queue: int | None = None) -> ClusterLLM:
    loaded = TextInterface(None, "tiny", 100, 50, frozenset(), None, {})
    return ClusterLLM(loaded, replicas, max_queue=max_queue)
