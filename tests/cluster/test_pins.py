"""Pinning is best effort: whatever becomes of it, the answer comes, and comes soon."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from support.model_zoo import build_supported
from support.pretended_replicas import SECRET, Handler, client_of, streams_over
from support.time_limit import HANGING

from radixkv import LLM, AsyncLLM, SamplingParams
from radixkv.cluster import ReplicaSet, replica_app, replica_pins
from radixkv.cluster.replica_pins import keep_prefix
from radixkv.cluster.wire import encode_pin
from radixkv.prompts import Prompt
from radixkv.routing import prompt_hashes
from radixkv.server.chat.prefix_keeper import PrefixKeeper
from radixkv.server.chat.prompt_caching import Breakpoint
from radixkv.server.chat.request import ChatCompletionRequest

PREFIX = list(range(40))


async def never(request: httpx.Request) -> httpx.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def broken(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json=["nothing"])


def holding(answer: Handler) -> ReplicaSet:
    """A set of one replica, which holds `PREFIX`."""
    replicas = ReplicaSet(SECRET)
    replicas._clients["one"] = client_of(answer)
    replicas._streams = streams_over(replicas._clients)
    replicas.streams.router.stored("one", prompt_hashes(PREFIX, "", 16))
    return replicas


def test_an_empty_prefix_is_kept_nowhere() -> None:
    """Where no prefix of the prompt is what the chat template writes of the marked part, the answer comes all the same."""
    assert asyncio.run(keep_prefix(holding(never), "", "", [], 300.0)) == 0


@pytest.mark.parametrize("answer", [never, broken])
def test_a_replica_that_does_not_pin_holds_nothing_up(answer: Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_pins, "_SECONDS_TO_PIN", 0.0 if answer is never else HANGING)

    async def main() -> int:
        async with asyncio.timeout(HANGING):
            return await keep_prefix(holding(answer), "", "", PREFIX, 300.0)

    assert asyncio.run(main()) == 0


def test_prefixes_of_both_times_to_live_are_pinned_at_once() -> None:
    class Remote:
        """Answers once it was asked for both."""

        def __init__(self) -> None:
            self.together = asyncio.Barrier(2)

        async def run_tokenizer(self, function: Any, **options: Any) -> dict[float, list[int]]:
            return {300.0: PREFIX, 3600.0: PREFIX[:16]}

        async def keep(self, tenant: str, namespace: str, token_ids: list[int], ttl: float) -> int:
            await self.together.wait()
            return len(token_ids)

    async def main() -> Mapping[float, int]:
        chat, marks = ChatCompletionRequest(messages=[]), [Breakpoint([], 300.0), Breakpoint([], 3600.0)]
        keeper = PrefixKeeper(Remote(), "", chat, marks, Prompt([1]))  # type: ignore[arg-type]
        keeper.begin()
        keeper.prompt_is_computed()
        async with asyncio.timeout(HANGING):
            return await keeper.kept()

    assert asyncio.run(main()) == {300.0: 40, 3600.0: 16}


async def test_a_tenant_has_one_share_of_an_engine_that_serves_clients_and_ingresses() -> None:
    """It used to have one for each of the two ways."""
    first, second = list(range(5, 69)), list(range(105, 169))
    llm = LLM(build_supported("llama"), num_blocks=40, block_size=16)
    llm.generate([{"prompt_token_ids": each} for each in (first, second)], SamplingParams(max_tokens=1), use_tqdm=False)
    async with AsyncLLM(llm) as engine:
        transport = httpx.ASGITransport(replica_app(engine, SECRET))
        headers = {"Authorization": f"Bearer {SECRET}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://one", headers=headers) as client:
            answer = await client.post("/pin", content=encode_pin("", "", first, 300.0))
        assert answer.json() == {"num_tokens": 64}
        assert await engine.keep("", "", second, 300.0) == 64
        assert [pin.num_tokens for pin in await engine.call(lambda engine: list(engine.cache.pins()))] == [64]
