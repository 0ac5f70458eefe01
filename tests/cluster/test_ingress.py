"""The public server over replicas answers as it does over an engine of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from support.in_process_server import make_client
from support.replica_servers import SECRET, ingress_client, local_replicas, tiny_llm
from support.time_limit import HANGING

from radixkv import LLM, AsyncLLM, SamplingParams
from radixkv.cache import InvariantViolation
from radixkv.cluster import ClusterLLM, ReplicaSet, create_ingress, replica_pins, text_interface
from radixkv.cluster.replica_pins import keep_prefix
from radixkv.config import ModelConfig
from radixkv.engine.clearing import ALL_NAMESPACES
from radixkv.observe.inspect.replica_snapshots import read_snapshots
from radixkv.observe.inspect.snapshot import CacheSnapshot
from radixkv.prompts import Prompt, as_prompts
from radixkv.server.config import ServerConfig

TEXT = (
    "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, fifteen, sixteen."
)
COMPLETION = {"prompt": TEXT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", COMPLETION),
    "samples": ("/v1/completions", {**COMPLETION, "n": 2, "temperature": 1, "seed": 3, "logprobs": 2}),
    "stream": ("/v1/completions", {**COMPLETION, "stream": True, "stream_options": {"include_usage": True}}),
    "several prompts": ("/v1/completions", {**COMPLETION, "prompt": [TEXT, "Red, green,"]}),
    "beams": ("/v1/completions", {**COMPLETION, "use_beam_search": True, "n": 3}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 8, "seed": 1}),
    "schema": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Hi."}],
            "max_tokens": 20,
            "seed": 1,
            "response_format": {"type": "json_object"},
        },
    ),
    "response": ("/v1/responses", {"input": "Hello", "max_output_tokens": 8, "temperature": 0}),
    "message": (
        "/v1/messages",
        {"model": "model", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 8, "temperature": 0},
    ),
    "tokenize": ("/tokenize", {"prompt": TEXT}),
    "no field": ("/v1/completions", {**COMPLETION, "max_token": 3}),
    "outside the vocabulary": ("/v1/completions", {**COMPLETION, "prompt": [10**6]}),
    "below it": ("/v1/completions", {**COMPLETION, "prompt": [-1]}),
    "beyond 32 bits": ("/v1/completions", {**COMPLETION, "prompt": [2**31]}),
    "beyond 32 bits, explained": ("/v1/completions", {**COMPLETION, "prompt": [2**31], "explain_cache": True}),
    "beyond 64 bits": ("/v1/completions", {**COMPLETION, "prompt": [10**25]}),
    "no tokens": ("/v1/completions", {**COMPLETION, "prompt": [[]]}),
    "no schema": ("/v1/completions", {**COMPLETION, "structured_outputs": {"json": {"type": "nothing"}}}),
    "too long": ("/v1/completions", {**COMPLETION, "max_tokens": None, "prompt": [5] * 3000}),
    "too many": ("/v1/completions", {**COMPLETION, "n": 1000}),
}
REFUSED = (
    "no field",
    "outside the vocabulary",
    "below it",
    "beyond 32 bits",
    "beyond 32 bits, explained",
    "beyond 64 bits",
    "no tokens",
    "no schema",
    "too long",
    "too many",
)
VARYING = ("id", "created", "created_at", "completed_at", "usage", "model", "system_fingerprint")


def without_ids(value: Any) -> Any:
    """An answer without what differs each time."""
    if isinstance(value, dict):
        return {name: without_ids(each) for name, each in value.items() if name not in VARYING}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def comparable(response: httpx.Response) -> tuple[int, Any]:
    if "event-stream" in response.headers.get("content-type", ""):
        return response.status_code, "".join(
            line.partition('"text":')[2].partition(",")[0] for line in response.text.splitlines()
        ).replace('""', "")
    return response.status_code, without_ids(response.json())


async def counted(client: httpx.AsyncClient) -> list[str]:
    """What the metrics say about requests that ended."""
    names = (
        "request_success_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "e2e_request_latency_seconds_count",
    )
    lines = (await client.get("/metrics")).text.splitlines()
    return sorted(line for line in lines if line.startswith(tuple(f"radixkv:{name}" for name in names)))


async def test_it_answers_as_one_engine_does(default_tokenizer: Any, tmp_path: Path) -> None:
    alone = AsyncLLM(tiny_llm(default_tokenizer), max_seqs_per_request=32)
    llms = [tiny_llm(default_tokenizer) for _ in range(2)]
    async with (
        make_client(alone) as one,
        local_replicas(tmp_path, *llms) as (replicas, _),
        ingress_client(replicas, default_tokenizer, served_model_name=("model",)) as several,
    ):
        for name, (path, body) in REQUESTS.items():
            expected = comparable(await one.post(path, json=body))
            assert expected[0] == (400 if name in REFUSED else 200), expected
            assert comparable(await several.post(path, json=body)) == expected, name
        assert (await several.get("/ready")).status_code == 200
        assert (await several.get("/live")).json()["tokens"]["computed"] > 0
        assert await counted(several) == await counted(one)
    await alone.shutdown()


@pytest.mark.usefixtures("loads_are_worth_it")
async def test_usage_counts_drafts_and_loaded_tokens_as_one_engine_does(default_tokenizer: Any, tmp_path: Path) -> None:
    """These counts used to stay on the replica."""
    prompts = [f"{word} {TEXT * 12}" for word in ("First", "Second", "Third", "First", "First")]

    def make() -> LLM:
        return tiny_llm(
            default_tokenizer,
            num_blocks=64,
            host_cache_size="64MiB",
            cache_write_policy="write-through",
            speculative_config={"method": "tree"},
        )

    async def usages(client: httpx.AsyncClient, engine: AsyncLLM) -> list[Any]:
        found = []
        for prompt in prompts:
            answer = (
                await client.post("/v1/completions", json={**COMPLETION, "prompt": prompt, "max_tokens": 30})
            ).json()
            assert await engine.call(lambda engine: engine.tiers is None or engine.tiers.flush(HANGING))
            found.append(answer["usage"])
        return found

    engine = AsyncLLM(make(), max_seqs_per_request=32)
    async with (
        make_client(engine) as one,
        local_replicas(tmp_path, make()) as (replicas, (behind,)),
        ingress_client(replicas, default_tokenizer, served_model_name=("model",)) as several,
    ):
        expected = await usages(one, engine)
        assert expected[3]["prompt_tokens_details"]["loaded_tokens"]["host"] > 0
        found = await usages(several, behind.llm)
        assert [usage["prompt_tokens_details"] for usage in found] == [
            usage["prompt_tokens_details"] for usage in expected
        ]
        for usage in (expected[4], found[4]):  # how many are drafted depends on how long steps take
            assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    await engine.shutdown()


async def test_administration_means_all_replicas(default_tokenizer: Any, tmp_path: Path) -> None:
    llms = [tiny_llm(default_tokenizer) for _ in range(2)]
    async with (
        local_replicas(tmp_path, *llms) as (replicas, servers),
        ingress_client(replicas, default_tokenizer) as client,
    ):
        admin = {"Authorization": "Bearer admin"}
        for server in servers:
            async for _ in server.llm.generate({"prompt_token_ids": list(range(64))}):
                break
        cleared = (await client.post("/admin/clear_cache", json={}, headers=admin)).json()
        assert cleared["namespaces"] == 1
        assert all(server.llm.stats.num_evictable_blocks == 0 for server in servers)
        assert (await client.get("/admin/nothing", headers=admin)).status_code == 404
        states = (await client.get("/admin/replicas", headers=admin)).json()["replicas"]
        assert (await client.get("/live")).json()["replicas"] == states
        assert [(state["name"], state["up"], state["blocks"]) for state in states] == [
            ("0", True, 300),
            ("1", True, 300),
        ]
        assert 'radixkv:kv_cache_blocks{state="free"} ' in (await client.get("/metrics")).text


async def test_each_cache_can_be_seen_and_all_are_verified(
    default_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llms = [tiny_llm(default_tokenizer) for _ in range(2)]
    async with (
        local_replicas(tmp_path, *llms) as (replicas, servers),
        ingress_client(replicas, default_tokenizer) as client,
    ):
        client.headers["Authorization"] = "Bearer admin"
        async for _ in servers[1].llm.generate(TEXT, SamplingParams(max_tokens=1)):
            pass
        snapshots = [await client.get(f"/admin/replicas/{name}/snapshot") for name in "01"]
        empty, full = (CacheSnapshot.from_fields(each.json()) for each in snapshots)
        assert empty.num_cached_blocks == 0
        assert full.nodes[0].text is not None
        assert TEXT.startswith(full.nodes[0].text)
        assert (await client.get("/admin/replicas/2/snapshot")).status_code == 404
        together = read_snapshots((await client.get("/admin/snapshot")).content)
        assert [(name, one.nodes) for name, one in together.items()] == [
            ("0", []),
            ("1", [replace(full.nodes[0], idle_seconds=together["1"].nodes[0].idle_seconds)]),
        ]
        checked = (await client.post("/admin/check")).json()
        assert sum(checked[name] for name in ("free_blocks", "evictable_blocks", "blocks_in_use")) == 600
        assert checked["evictable_blocks"] == full.num_cached_blocks
        monkeypatch.setattr(llms[1].engine.cache, "check", Mock(side_effect=InvariantViolation("planted")))
        broken = await client.post("/admin/check")
        assert broken.status_code == 500
        assert "replica '1'" in broken.json()["error"]["message"]
        assert "planted" in broken.json()["error"]["message"]
        await servers[1].kill()
        while replicas.available != ["0"]:
            await asyncio.sleep(0.001)
        gone = await client.get("/admin/replicas/1/snapshot")
        assert (gone.status_code, "does not answer" in gone.text) == (503, True)
        assert (await client.get("/admin/snapshot")).status_code == 503
        checked = (await client.post("/admin/check")).json()
        assert sum(checked[name] for name in ("free_blocks", "evictable_blocks", "blocks_in_use")) == 300
        await servers[0].kill()
        while replicas.available:
            await asyncio.sleep(0.001)
        nobody = await client.post("/admin/check")
        assert (nobody.status_code, nobody.json()["error"]["message"]) == (503, "no replica is up")
        for server in servers:
            await server.start()


def test_a_client_that_goes_away_is_aborted_where_its_stream_is(default_tokenizer: Any, tmp_path: Path) -> None:
    body = {**COMPLETION, "max_tokens": 1500, "stream": True}

    async def main() -> None:
        llms = [tiny_llm(default_tokenizer) for _ in range(2)]
        async with local_replicas(tmp_path, *llms) as (replicas, servers):
            ingress = create_ingress(ServerConfig(), replicas, model_config=ModelConfig(tokenizer=default_tokenizer))
            request = ingress.llm.submit
            stream = (await request(*await _prompt(ingress, body)))[0]
            await anext(stream)
            here = next(server for server in servers if server.llm.num_unfinished)
            stream.close()
            while here.llm.num_unfinished:
                await asyncio.sleep(0)
            assert here.llm.stats.num_running <= 1
            assert ingress.llm.num_slots_taken == 0
            await ingress.llm.shutdown()

    async def _prompt(ingress: Any, body: dict[str, Any]) -> tuple[Any, Any]:
        prompts = await ingress.llm.run_tokenizer(lambda loaded: as_prompts(body["prompt"], loaded))
        return prompts, SamplingParams(max_tokens=body["max_tokens"], ignore_eos=True)

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
async def test_a_marked_prefix_is_kept_on_the_replica_that_has_it(
    path: str, default_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_pins, "_SECONDS_TO_PIN", 600.0)  # however busy the machine
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2}
    text = {"type": "text", "text": TEXT}
    if path == "/v1/messages":
        body["system"] = [{**text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    else:
        mark = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
        body["messages"].insert(0, {"role": "system", "content": [{**text, **mark}]})

    def counts(usage: dict[str, Any]) -> tuple[int, int]:
        """Tokens that are kept, and those that were reused."""
        if path == "/v1/messages":
            return usage["cache_creation"]["ephemeral_1h_input_tokens"], usage["cache_read_input_tokens"]
        details = usage["prompt_tokens_details"]
        return details["cache_write_tokens"], details["cached_tokens"]

    llms = [tiny_llm(default_tokenizer) for _ in range(2)]
    async with (
        local_replicas(tmp_path, *llms) as (replicas, servers),
        ingress_client(replicas, default_tokenizer, served_model_name=("m",)) as client,
    ):
        answered = [counts((await client.post(path, json=body)).json()["usage"]) for _ in range(2)]
        kept = answered[0][0]
        pins = [await server.llm.call(lambda engine: list(engine.cache.pins())) for server in servers]
        (pin,) = [*pins[0], *pins[1]]
        assert kept == pin.num_tokens > 16
        assert answered[1][1] >= kept
        served = [server.llm.stats.cache.opened_tables for server in servers]
        assert [bool(each) for each in pins] == [bool(count) for count in served]
        assert await keep_prefix(replicas, "", "another", list(range(100)), 5.0) == 0


async def test_without_a_replica_it_is_not_ready(default_tokenizer: Any, tmp_path: Path) -> None:
    async with (
        local_replicas(tmp_path, tiny_llm(default_tokenizer), wait_seconds=0.0) as (replicas, servers),
        ingress_client(replicas, default_tokenizer) as client,
    ):
        await servers[0].kill()
        while replicas.available:
            await asyncio.sleep(0.001)
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        refused = await client.post("/v1/completions", json=COMPLETION)
        assert refused.status_code == 503
        assert "there is no replica" in refused.json()["error"]["message"]


async def test_prompts_beside_an_impossible_one_reach_no_replica(default_tokenizer: Any, tmp_path: Path) -> None:
    async with (
        local_replicas(tmp_path, tiny_llm(default_tokenizer)) as (replicas, (server,)),
        ingress_client(replicas, default_tokenizer) as client,
    ):
        submit = Mock(wraps=server.llm.submit)
        server.llm.submit = submit  # type: ignore[method-assign]
        good = list(range(100, 164))
        for bad in ([10**6], []):
            refused = await client.post("/v1/completions", json={**COMPLETION, "prompt": [good, bad]})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "prompt"
        submit.assert_not_called()
        assert (await client.post("/v1/completions", json={**COMPLETION, "prompt": [good]})).status_code == 200
        submit.assert_called_once()


async def test_conversations_find_as_much_cached_as_on_one_server(default_tokenizer: Any, tmp_path: Path) -> None:
    """24 conversations of 3 turns with 4 system prompts: at most 5 % fewer cached tokens, and the same answers.

    By one ingress, and by two of which each gets every other turn of a conversation.
    """
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    async def talk(models: Sequence[Any], number: int) -> tuple[list[int], int]:
        prompt, num_cached = [*range(1000 * (number % 4), 1000 * (number % 4) + 300)], 0
        for turn in range(3):
            prompt += range(10_000 + 100 * number + 30 * turn, 10_030 + 100 * number + 30 * turn)
            model = models[(number // 4 + turn) % len(models)]
            (stream,) = await model.submit([Prompt(list(prompt))], params, f"{number}-{turn}")
            async for delta in stream:
                prompt += delta.outputs[0].token_ids
            num_cached += delta.num_cached_tokens
        return prompt, num_cached

    async def all_talks(*models: Any) -> tuple[list[list[int]], int]:
        texts, num_cached = [], 0
        for start in range(0, 24, 4):
            for prompt, cached in await asyncio.gather(*(talk(models, number) for number in range(start, start + 4))):
                texts.append(prompt)
                num_cached += cached
        return texts, num_cached

    async with AsyncLLM(tiny_llm(default_tokenizer, num_blocks=1500)) as alone:
        expected, most = await all_talks(alone)
    llms = [tiny_llm(default_tokenizer, num_blocks=1500) for _ in range(2)]
    async with local_replicas(tmp_path, *llms) as (replicas, servers):
        others = ReplicaSet(SECRET)
        for number, server in enumerate(servers):
            await others.add(str(number), server.url)
        model_config = ModelConfig(tokenizer=default_tokenizer)
        first, second = (
            ClusterLLM(text_interface(each, config=model_config), each, model_config=model_config)
            for each in (replicas, others)
        )
        for ingresses in ((first,), (first, second)):
            await first.clear(ALL_NAMESPACES)
            texts, found = await all_talks(*ingresses)
            assert texts == expected
            assert found >= 0.95 * most, len(ingresses)
        await first.shutdown()
        await second.shutdown()
        await others.close()
