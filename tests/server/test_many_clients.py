"""Many clients at once, and clients that disconnect at any moment."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from urllib.parse import urlsplit

import httpx
import openai
from support.server_process import MODEL, TENANT_A, ServerProcess

from radixkv import LLM, SamplingParams


def conversations(count: int) -> list[list[dict[str, str]]]:
    system = {"role": "system", "content": "You are a helpful librarian. Answer in one short sentence."}
    return [[system, {"role": "user", "content": f"Where is shelf number {number}?"}] for number in range(count)]


def test_64_streams_at_once_get_the_library_s_answers(default_server: ServerProcess, default_llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=10)
    expected = [output.outputs[0].text for output in default_llm.chat(conversations(64), params, use_tqdm=False)]

    async def answer(client: openai.AsyncOpenAI, messages: list[dict[str, str]]) -> str:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=10,
            temperature=0,
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{default_server.url}/v1", api_key=TENANT_A, max_retries=0) as client:
            return await asyncio.gather(*(answer(client, messages) for messages in conversations(64)))

    steps = default_server.metrics()["radixkv:num_steps_total"]
    answers = asyncio.run(main())
    # Logits are rounded differently in another batch: an answer may differ where two tokens are equally likely, but rarely.
    assert sum(one != other for one, other in zip(answers, expected, strict=True)) <= 2
    metrics = default_server.metrics()
    assert metrics["radixkv:prefix_cache_hits_total"] > 0
    # One after the other, they take 640 steps. How many run at once depends on how fast they arrive.
    assert metrics["radixkv:num_steps_total"] - steps < 320


async def test_clients_that_disconnect_at_random_moments(default_server: ServerProcess) -> None:
    rng = random.Random(3)
    bodies = [
        {"messages": messages, "max_tokens": 400, "ignore_eos": True, **options}
        for messages in conversations(12)
        for options in (
            {"stream": True},
            {"stream": True, "n": 3, "temperature": 1},
            {"stream": False},
            {"stream": True, "use_beam_search": True, "n": 2},
        )
    ]

    async def visit(client: httpx.AsyncClient, body: dict[str, object], patience: float, num_reads: int) -> None:
        try:
            async with asyncio.timeout(patience), client.stream("POST", "/v1/chat/completions", json=body) as response:
                async for _ in response.aiter_raw():
                    num_reads -= 1
                    if num_reads < 0:
                        return
        except TimeoutError:
            pass

    headers = {"Authorization": f"Bearer {TENANT_A}"}
    async with httpx.AsyncClient(base_url=default_server.url, headers=headers, timeout=600) as client:
        await asyncio.gather(
            *(visit(client, body, rng.uniform(0, 3), rng.choice([0, 1, 2, 5, 1000])) for body in bodies)
        )
    # The fixture waits until all of them have left the engine, and verifies the cache.


def test_a_disconnected_clients_request_is_aborted_within_a_step(default_server: ServerProcess) -> None:
    body = {"prompt": "Once", "max_tokens": 8000, "n": 3, "ignore_eos": True, "stream": True}
    aborted = 'radixkv:request_success_total{finished_reason="abort"}'
    before = default_server.metrics().get(aborted, 0)
    with default_server.client(TENANT_A) as client:
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines)
            assert default_server.admin("check")["running_requests"] == 1
        steps = default_server.metrics()["radixkv:num_steps_total"]
        while default_server.admin("check")["running_requests"]:
            time.sleep(0.001)
        # The server must first detect that the connection was closed; far fewer steps than the 8,000 that were requested.
        assert default_server.metrics()["radixkv:num_steps_total"] - steps < 1000
        assert default_server.metrics()[aborted] == before + 3


def test_incomplete_requests_are_ignored(server: ServerProcess) -> None:
    address = urlsplit(server.url)
    headers = b"Host: x\r\nContent-Type: application/json\r\nContent-Length: 40\r\n\r\n"
    request = b"POST /v1/completions HTTP/1.1\r\n" + headers + b'{"prompt"'
    for length in (1, 10, 30, len(request) - 5, len(request)):
        with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
            connection.sendall(request[:length])
    with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
        connection.sendall(b"\x16\x03\x01 this is not HTTP \r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
