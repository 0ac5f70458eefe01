"""An ingress notes when a replica schedules a request, and when its first token comes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.held_steps import HeldSteps
from support.pretended_replicas import PROMPT, answering, client_of, line, streams_over, tokens, until
from support.replica_servers import local_replicas, tiny_llm

from radixkv import BeamSearchParams, SamplingParams
from radixkv.cluster import create_ingress
from radixkv.config import ModelConfig
from radixkv.outputs import RequestMetrics
from radixkv.prompts import Prompt
from radixkv.server.config import ServerConfig


async def test_what_has_a_token_was_admitted_although_its_replica_did_not_say_so() -> None:
    """A replica does not, where the first token is there as soon: the prompt would be charged to nobody."""
    times = RequestMetrics(0.0)
    assert await tokens(streams_over({"a": client_of(answering(line(7, "length")))}), times=times) == [7]
    assert times.scheduled_time is not None
    assert times.scheduled_time == times.first_token_time


async def test_a_search_whose_replica_sends_nothing_before_its_result_has_all_of_its_times() -> None:
    """A replica does not, where the result is there as soon: the first token would be in no metric."""
    beam = [[*PROMPT.token_ids, 9], [[[9, -1.0, 1, "a"]]], -1.0, "length", None]
    result = {"beams": [beam], "finished": True, "num_prompt_tokens": len(PROMPT.token_ids), "num_cached_tokens": 0}
    streams = streams_over({"a": client_of(answering(json.dumps(result).encode() + b"\n"))})
    metrics = (await streams.beam_search(PROMPT, BeamSearchParams(beam_width=2, max_tokens=1), "one")).metrics
    assert metrics.scheduled_time is not None
    assert metrics.scheduled_time == metrics.first_token_time


async def test_a_search_has_its_first_token_before_its_result(default_tokenizer: Any, tmp_path: Path) -> None:
    """It used to have none until its end, so that `first_token_timeout` ended searches that were computing."""
    params = BeamSearchParams(beam_width=2, max_tokens=20, ignore_eos=True)
    async with local_replicas(tmp_path, tiny_llm(default_tokenizer)) as (replicas, (server,)):
        llm = create_ingress(ServerConfig(), replicas, model_config=ModelConfig(tokenizer=default_tokenizer)).llm
        steps = await server.llm.call(HeldSteps)
        (stream,) = await llm.submit([Prompt(list(range(40)))], params)
        times = stream.times
        assert times.first_token_time is None
        steps.allow(3)
        await until(lambda: times.first_token_time is not None)
        assert not stream.ended
        steps.allow_all()
        result = await anext(stream)
        assert result.metrics.first_token_time == times.first_token_time
        assert result.metrics.finished_time > times.first_token_time
        await llm.shutdown()


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=4), BeamSearchParams(beam_width=2, max_tokens=4)])
async def test_what_waits_on_a_replica_is_not_admitted(
    params: SamplingParams | BeamSearchParams, default_tokenizer: Any, tmp_path: Path
) -> None:
    """What ended in a replica's queue used to be charged its prompt, and a beam search all that it might have taken."""
    one = tiny_llm(default_tokenizer, max_num_batched_tokens=16)
    async with local_replicas(tmp_path, one) as (replicas, (server,)):
        llm = create_ingress(ServerConfig(), replicas, model_config=ModelConfig(tokenizer=default_tokenizer)).llm
        steps = await server.llm.call(HeldSteps)
        (stream,) = await llm.submit([Prompt(list(range(200)))], params)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not stream.admitted
        steps.allow(1)  # of a dozen for the prompt
        await until(lambda: stream.admitted)
        times = stream.times
        assert times.first_token_time is None
        steps.allow_all()
        *_, result = [piece async for piece in stream]
        assert result.metrics.scheduled_time == times.scheduled_time
        assert result.metrics.first_token_time > times.scheduled_time
        await llm.shutdown()
