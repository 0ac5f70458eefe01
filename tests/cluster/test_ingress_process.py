"""A real `radixkv ingress`: when it is killed, its clients' connections break, and a retry at another one works."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.held_steps import HeldSteps
from support.pretended_replicas import until
from support.replica_servers import SECRET, LocalReplica, local_replicas, tiny_llm

from radixkv.bench.serving.server_process import BenchProcess

NUM_PROMPTS = 8
# As many tokens a stream may get before its ingress is killed.
NUM_BEGUN = 20


@asynccontextmanager
async def running_ingress(
    model: Path, replicas: list[LocalReplica]
) -> AsyncIterator[tuple[BenchProcess, httpx.AsyncClient]]:
    """An ingress that has reached all replicas."""
    named = [part for number, each in enumerate(replicas) for part in ("--replica", f"{number}={each.url}")]
    ingress = BenchProcess(["ingress", str(model), "--port", "0", *named], {"RADIXKV_REPLICA_SECRET": SECRET})
    ingress.start()
    try:
        await asyncio.to_thread(ingress.wait_until_up)
        async with httpx.AsyncClient(base_url=ingress.address, timeout=1800) as client:
            while sum(each["up"] for each in (await client.get("/live")).json()["replicas"]) < len(replicas):
                pass
            yield ingress, client
    finally:
        ingress.kill()


def request(number: int, max_tokens: int) -> dict[str, Any]:
    prompt = [*range(1000 * number, 1000 * number + 64)]
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 1, "seed": number, "ignore_eos": True}


async def answer(client: httpx.AsyncClient, number: int, max_tokens: int = 8) -> tuple[str, int]:
    """A text, and how many of its prompt's tokens were found in a cache."""
    response = await client.post("/v1/completions", json=request(number, max_tokens))
    assert response.status_code == 200, response.text
    document = response.json()
    return document["choices"][0]["text"], document["usage"]["prompt_tokens_details"]["cached_tokens"]


async def read_until_it_breaks(client: httpx.AsyncClient, number: int, begun: asyncio.Event) -> str:
    """The text of a stream that does not end."""
    text = ""
    with pytest.raises(httpx.TransportError):
        async with client.stream("POST", "/v1/completions", json={**request(number, 1500), "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    if text:
                        begun.set()
    return text


@pytest.mark.slow
async def test_another_ingress_answers_the_same_and_has_what_replicas_hold(
    default_tokenizer: Any, tiny_model_folder: Path, tmp_path: Path
) -> None:
    llms = [tiny_llm(default_tokenizer) for _ in range(2)]
    async with local_replicas(tmp_path, *llms) as (_, replicas):
        async with running_ingress(tiny_model_folder, replicas) as (ingress, client):
            expected = [await answer(client, number) for number in range(NUM_PROMPTS)]
            assert {found for _, found in expected} == {0}
            assert all(replica.llm.stats.num_evictable_blocks for replica in replicas)
            steps = [await replica.llm.call(HeldSteps) for replica in replicas]
            for each in steps:
                each.allow(NUM_BEGUN)
            begun = asyncio.Event()
            broken = asyncio.ensure_future(read_until_it_breaks(client, NUM_PROMPTS, begun))
            await begun.wait()
            # All that the ingress has done for its requests, it has done without torch.
            assert "libtorch" not in Path(f"/proc/{ingress.pid}/maps").read_text()
            ingress.kill()
            beginning = await broken
            assert beginning
            for each in steps:
                each.allow_all()
        await until(lambda: not any(replica.llm.stats.num_running for replica in replicas))
        async with running_ingress(tiny_model_folder, replicas) as (_, client):
            again = [await answer(client, number) for number in range(NUM_PROMPTS)]
            assert [text for text, _ in again] == [text for text, _ in expected]
            assert {found for _, found in again} == {63}
            whole, _ = await answer(client, NUM_PROMPTS, NUM_BEGUN)
            assert whole.startswith(beginning)
