"""Attacks that try to deny a server to its other users, each of which has worked against a server of language models."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx

_MEGABYTE_OF_OBJECTS = json.dumps({"prompt": [{}] * 350_000}).encode()
_HELLO = ({"role": "user", "content": "Hello"},)


async def outcome_of(attack: Callable[[], Awaitable[str]]) -> str:
    """Attack once: what a `HostileClient` is answered with, or the name of the error that ended the attack."""
    try:
        return await attack()
    except (httpx.HTTPError, OSError) as error:
        return type(error).__name__


class HostileClient:
    """Each attack returns the status that it was answered with, or why there was none.

    Args:
        client: has a key of the server in its headers, and none without them.
        rng: varies the attacks.
        patience: for how many seconds a connection is held at most.
    """

    def __init__(self, client: httpx.AsyncClient, rng: random.Random, patience: float) -> None:
        self._client = client
        self._rng = rng
        self._patience = patience

    @property
    def attacks(self) -> Mapping[str, Callable[[], Awaitable[str]]]:
        return {
            "a megabyte of wrong types, without a key": self.wrong_types_without_key,
            "a megabyte of wrong types": self.wrong_types,
            "half a request": self.half_a_request,
            "an answer that is not read": self.unread_answer,
            "a burst": self.burst,
            "as many samples as are allowed": self.many_samples,
            "samples that wait for a stream to end": self.waiting_samples,
            "an answer that is left": self.left_answer,
            "a grammar that is dear": self.dear_grammar,
            "a list of choices": self.many_choices,
            "a bias for every token": self.many_biases,
            "log-probabilities of long prompts": self.many_logprobs,
            "empty messages": self.empty_messages,
            "ids to decode": self.many_ids,
            "deep JSON": self.deep_json,
        }

    async def wrong_types_without_key(self) -> str:
        headers = {"Authorization": "Bearer no-such-key", "Content-Type": "application/json"}
        return await self._post("/v1/completions", content=_MEGABYTE_OF_OBJECTS, headers=headers)

    async def wrong_types(self) -> str:
        headers = {"Content-Type": "application/json"}
        return await self._post("/v1/completions", content=_MEGABYTE_OF_OBJECTS, headers=headers)

    async def half_a_request(self) -> str:
        return await self._raw(b"Content-Length: 1000\r\n\r\n{")

    async def unread_answer(self) -> str:
        body = json.dumps(self._chat(max_tokens=1500, stream=True, ignore_eos=True)).encode()
        return await self._raw(f"Content-Length: {len(body)}\r\n\r\n".encode() + body, read=False)

    async def burst(self) -> str:
        requests = [self._post("/v1/chat/completions", json=self._chat(max_tokens=100)) for _ in range(40)]
        return max(await asyncio.gather(*requests))

    async def many_samples(self) -> str:
        return await self._post(
            "/v1/chat/completions", json=self._chat(n=self._rng.choice((4, 8, 128)), max_tokens=200)
        )

    async def waiting_samples(self) -> str:
        stream = self._post("/v1/chat/completions", json=self._chat(max_tokens=200, ignore_eos=True))
        samples = self._post("/v1/chat/completions", json=self._chat(n=8, max_tokens=16, temperature=1))
        return max(await asyncio.gather(stream, samples))

    async def left_answer(self) -> str:
        body = self._chat(max_tokens=500, stream=True)
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_bytes():
                if self._rng.random() < 0.2:
                    break
        return str(response.status_code)

    async def dear_grammar(self) -> str:
        item = {"type": "array", "items": {"type": "string", "pattern": "^(a|b|ab|ba)*$", "maxLength": 5000}}
        schema = {"type": "object", "properties": {f"p{i}": item for i in range(200)}}
        return await self._post("/v1/chat/completions", json=self._chat(max_tokens=50, guided_json=schema))

    async def many_choices(self) -> str:
        choices = [f"{self._rng.random()}" for _ in range(10_000)]
        return await self._post("/v1/chat/completions", json=self._chat(guided_choice=choices))

    async def many_biases(self) -> str:
        return await self._post("/v1/chat/completions", json=self._chat(logit_bias={str(i): 1 for i in range(49_152)}))

    async def many_logprobs(self) -> str:
        prompts = [[self._rng.randrange(1000, 40_000) for _ in range(1000)] for _ in range(3)]
        body = {"prompt": prompts, "max_tokens": 1, "echo": True, "logprobs": 20}
        return await self._post("/v1/completions", json=body)

    async def empty_messages(self) -> str:
        body = self._chat() | {"messages": [{"role": "user", "content": ""}] * 100_000}
        return await self._post("/v1/chat/completions", json=body)

    async def many_ids(self) -> str:
        return await self._post("/detokenize", json={"tokens": [5] * 1_000_000})

    async def deep_json(self) -> str:
        return await self._post(
            "/v1/chat/completions", content=b"[" * 100_000, headers={"Content-Type": "application/json"}
        )

    def _chat(self, **options: Any) -> dict[str, Any]:
        return {
            "messages": [*_HELLO, {"role": "user", "content": f"{self._rng.random()}"}],
            "max_tokens": 16,
            **options,
        }

    async def _post(self, path: str, **options: Any) -> str:
        return str((await self._client.post(path, **options)).status_code)

    async def _raw(self, rest: bytes, read: bool = True) -> str:
        """Send a request as bytes, and hold the connection until the server closes it."""
        url = self._client.base_url
        key = self._client.headers["Authorization"]
        reader, writer = await asyncio.open_connection(url.host, url.port)
        try:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\n"
            writer.write(head.encode() + b"Content-Type: application/json\r\n" + rest)
            await writer.drain()
            async with asyncio.timeout(self._patience):
                if not read:
                    await asyncio.Event().wait()
                line = await reader.readline()
                await reader.read()
                return line.decode().split()[1] if line else "closed"
        except TimeoutError:
            return "left"
        finally:
            writer.close()
