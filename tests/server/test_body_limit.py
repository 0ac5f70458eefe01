"""Bodies that would fill the memory, or block the event loop while they are parsed as JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send
from support.in_process_server import served

from radixkv import LLM
from radixkv.server.middleware.body_limit import BodyLimit


class Server:
    """An application that reads bodies, of at most 100 bytes, and answers when an event is set."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.bodies: list[bytes] = []
        self._limit = BodyLimit(self._answer, max_bytes=100)

    async def request(self, tenant: str, chunks: Iterable[bytes], **headers: str) -> None:
        parts = list(chunks)
        messages = [
            {"type": "http.request", "body": part, "more_body": index < len(parts)}
            for index, part in enumerate(parts, start=1)
        ]

        async def receive() -> Message:
            if not messages:
                await self.may_answer.wait()
                return {"type": "http.disconnect"}
            return messages.pop(0)

        async def send(message: Message) -> None: ...

        scope: dict[str, Any] = {
            "type": "http",
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
            "state": {"tenant": SimpleNamespace(name=tenant)},
        }
        await self._limit(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        if message["type"] == "http.request":
            assert not message["more_body"]
            self.bodies.append(message["body"])
            assert (await receive())["type"] == "http.disconnect"


async def refusal(request: Any) -> HTTPException:
    with pytest.raises(HTTPException) as raised:
        await request
    return raised.value


async def test_a_body_arrives_whole_and_what_follows_it_too() -> None:
    server = Server()
    server.may_answer.set()
    await server.request("ann", [b"one", b"", b"two"])
    await server.request("ann", [b""])
    assert server.bodies == [b"onetwo", b""]


async def test_a_long_body_is_refused_as_soon_as_that_is_known() -> None:
    server = Server()
    server.may_answer.set()
    await server.request("ann", [b"x" * 100], content_length="100")
    for request in (
        server.request("ann", [b"x" * 60, b"x" * 41, b"x"]),
        server.request("ann", [b"x" * 60, b"x" * 41]),  # which only the last part makes too long
        server.request("ann", [b"x" * 101]),
        server.request("ann", [], content_length="101"),
    ):
        assert (await refusal(request)).status_code == 413
    assert len(server.bodies) == 1


async def test_the_bodies_of_a_tenant_in_memory_are_bounded_together() -> None:
    """Sixty half-sent bodies of 8 MB used to take half a gigabyte, and every further connection more."""
    server = Server()
    unfinished = [asyncio.ensure_future(server.request("ann", [b"x" * 60, b"x" * 40])) for _ in range(16)]
    await asyncio.sleep(0)
    refused = await refusal(server.request("ann", [b"x"]))
    assert refused.status_code == 429
    assert refused.headers == {"Retry-After": "1"}
    others = asyncio.ensure_future(server.request("bob", [b"of another"]))
    await asyncio.sleep(0)
    assert server.bodies[-1] == b"of another"
    server.may_answer.set()
    await asyncio.gather(*unfinished, others)
    await server.request("ann", [b"x" * 100])
    assert len(server.bodies) == 18
    assert not server._limit._held


async def test_json_of_a_million_parts_is_not_read(llm: LLM) -> None:
    """Eight megabytes of empty lists used to block the event loop for 4.5 s, during which no request was answered."""
    body = {"prompt": "Hi", "max_tokens": 1}
    many = [
        {**body, "metadata": {"a": [[]] * 100_001}},
        {**body, "metadata": {"a": [{}] * 100_001}},
        {**body, "metadata": {"a": ['"'] * 100_001}},
        {**body, "metadata": {f"{i}": 1 for i in range(100_001)}},
    ]
    numbers = {**body, "metadata": {"a": [1] * 1_000_001}}
    # All of it is text, and none of it counts as a part.
    text = {**body, "user": '[{"a": [1, "\\""]}]' * 20_000}
    async with served(llm) as client:
        for content in [*(json.dumps(each).encode() for each in many), b'"' * 300_000, b'\\"' * 300_000]:
            response = await client.post(
                "/v1/completions", content=content, headers={"Content-Type": "application/json"}
            )
            assert response.status_code == 400, response.text
            if content.startswith(b"{"):
                assert "at most 100,000 strings, lists and objects" in response.json()["error"]["message"]
        for path in ("/v1/completions", "/v1/responses"):
            response = await client.post(path, json=numbers)
            assert response.status_code == 400
            assert "at most 1,000,000 values" in response.json()["error"]["message"]
        for sent in (text, {**body, "user": "," * 2_000_000}):
            assert (await client.post("/v1/completions", json=sent)).status_code == 200
        for sent, status in ((body, 200), (text, 400)):
            encoded = json.dumps(sent).encode("utf-16")
            response = await client.post(
                "/v1/completions", content=encoded, headers={"Content-Type": "application/json"}
            )
            assert response.status_code == status
        assert "UTF-8" in response.json()["error"]["message"]
