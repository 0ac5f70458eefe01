"""Replicas of one model with pools of several sizes: what is asked for is shortened, and no answer that has begun is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.answers_to_continue import PROMPT, SAMPLED, answer, begun_on
from support.held_steps import HeldSteps
from support.pretended_replicas import Cluster as PretendedCluster
from support.pretended_replicas import client_of, streams_over, tokens, until
from support.pretended_replicas import llm_of as pretended_llm
from support.replica_servers import drain, local_replicas, one_more, tiny_llm

from radixkv import BeamSearchParams, SamplingParams
from radixkv.cluster import ClusterLLM, ReplicaSet
from radixkv.errors import PromptTooLongError, RequestTooLargeError
from radixkv.model.text_interface import TextInterface
from radixkv.outputs import CompletionOutput
from radixkv.prompts import Prompt


async def test_a_smaller_pool_is_of_the_same_generation_and_shortens_answers() -> None:
    cluster = PretendedCluster()
    cluster.capacities["http://small"] = {"max_model_len": 60}
    replicas = await cluster.up("large")
    llm = pretended_llm(replicas)
    long = SamplingParams(max_tokens=1000)
    assert llm._bounded(long, Prompt([1] * 70)).max_tokens == 30
    await replicas.add("small", "http://small")
    assert len(set(replicas.generations.by_replica.values())) == 1
    assert llm.loaded.max_model_len == 60
    for params in (long, SamplingParams(max_tokens=None), BeamSearchParams(2, 61), BeamSearchParams(2, None)):
        assert llm._bounded(params, Prompt([1])).max_tokens == 59
    assert llm._bounded(SAMPLED, Prompt([1] * 59)).max_tokens == 1
    at_least = SamplingParams(max_tokens=90, min_tokens=70)  # which one server answers as far as there is room, too
    assert llm._bounded(at_least, Prompt([1] * 10)).min_tokens == 50
    with pytest.raises(PromptTooLongError, match="60 tokens > 59 maximum; a sequence has at most 60"):
        await llm.submit([Prompt([1] * 60)], SAMPLED)
    assert llm.num_slots_taken == 0
    await replicas.close()


async def test_an_answer_goes_on_only_where_it_ends_as_it_would_have(tmp_path: Path, default_tokenizer: Any) -> None:
    small = tiny_llm(default_tokenizer, num_blocks=8)
    async with local_replicas(tmp_path, small) as (replicas, _):
        begun = Prompt([5, 6], resume=[CompletionOutput(0, "", [7, 8])])
        fits = SamplingParams(temperature=0, max_tokens=127, ignore_eos=True)
        ended = [delta async for delta in replicas.streams.generate(begun, fits, "one")]
        assert ended[-1].outputs[0].finish_reason == "length"
        with pytest.raises(
            RequestTooLargeError, match="may reach 130 tokens with its prompt, and there is room for 129"
        ):
            async for _ in replicas.streams.generate(begun, replace(fits, max_tokens=128), "two"):
                pass


def tiny_cluster(tokenizer: Any, replicas: ReplicaSet) -> ClusterLLM:
    return ClusterLLM(TextInterface(tokenizer, "tiny", 640, len(tokenizer), frozenset(), None, {}), replicas)


async def test_what_waits_on_a_replica_that_dies_is_not_shortened_by_a_smaller_one(
    tmp_path: Path, default_tokenizer: Any
) -> None:
    """It was accepted at the larger one's length, and has no token yet; the smaller one joined later."""
    large, small = tiny_llm(default_tokenizer, num_blocks=40), tiny_llm(default_tokenizer, num_blocks=8)
    async with local_replicas(tmp_path, large, wait_seconds=600) as (replicas, (server,)):
        expected = await answer(replicas, long := replace(SAMPLED, max_tokens=60))
        llm = tiny_cluster(default_tokenizer, replicas)
        steps = await server.llm.call(HeldSteps)
        (stream,) = await llm.submit([PROMPT], long)
        async with one_more(replicas, small, tmp_path / "small.sock", "small"):
            assert llm.loaded.max_model_len == 129
            await server.kill()
            steps.allow_all()
            await until(lambda: "0" not in replicas.available)
            await server.start()
            assert [token_id async for delta in stream for token_id in delta.outputs[0].token_ids] == expected
            assert await llm.shutdown()
            await replicas.remove("small")


@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_drained_replica_finishes_what_fits_into_no_other_one(
    tmp_path: Path, default_tokenizer: Any, has_begun: bool
) -> None:
    large, small = tiny_llm(default_tokenizer, num_blocks=40), tiny_llm(default_tokenizer, num_blocks=8)
    async with local_replicas(tmp_path, large, wait_seconds=0) as (replicas, (server,)):
        expected = await answer(replicas)
        steps = await server.llm.call(HeldSteps)
        if has_begun:
            task = await begun_on(replicas, server, steps, "0")
        else:
            task = asyncio.ensure_future(answer(replicas))
            await until(lambda: replicas.streams.num_streams("0") and steps.is_holding)
        async with one_more(replicas, small, tmp_path / "small.sock", "small"):
            await drain(server)
            await until(lambda: replicas.available == ["small"])
            steps.allow_all()
            assert await task == expected
            await replicas.remove("small")


async def test_a_request_that_no_replica_has_accepted_is_as_long_as_fits_on_the_next_one(
    tmp_path: Path, default_tokenizer: Any
) -> None:
    large, small = tiny_llm(default_tokenizer, num_blocks=40), tiny_llm(default_tokenizer, num_blocks=8)
    async with local_replicas(tmp_path, large, wait_seconds=600) as (replicas, (server,)):
        llm = tiny_cluster(default_tokenizer, replicas)
        await server.kill()
        await until(lambda: not replicas.available)
        asked = asyncio.ensure_future(llm.submit([PROMPT], replace(SAMPLED, max_tokens=None)))
        await until(lambda: llm.num_slots_taken)
        async with one_more(replicas, small, tmp_path / "small.sock", "small"):
            (stream,) = await asked
            assert len([token_id async for delta in stream for token_id in delta.outputs[0].token_ids]) == 29
            with pytest.raises(RequestTooLargeError, match="may reach 200 tokens"):
                await answer(replicas, replace(SAMPLED, max_tokens=100))
            assert await llm.shutdown()
            await replicas.remove("small")
        await server.start()


@pytest.mark.parametrize(("room", "moves"), [(12, False), (13, True)])
async def test_an_answer_is_called_away_only_if_all_that_it_may_become_has_room_elsewhere(
    room: int, moves: bool
) -> None:
    async def hanging(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    clients = {name: client_of(hanging) for name in "ab"}
    streams = streams_over(clients, rooms={"b": room})
    reading = asyncio.ensure_future(tokens(streams, Prompt([1, 2, 3]), SamplingParams(max_tokens=10)))
    await until(lambda: streams.num_streams("a"))
    (attempt,) = streams._attempts[clients["a"]]
    streams.router.remove("a")
    streams.move(clients["a"])
    assert attempt._interrupted is moves
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
