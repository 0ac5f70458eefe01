"""An answer that several replicas could give, and one that has tokens of a certain replica."""

from __future__ import annotations

import asyncio

from support.held_steps import HeldSteps
from support.pretended_replicas import tokens, until
from support.replica_servers import LocalReplica

from radixkv import SamplingParams
from radixkv.cluster import ReplicaSet
from radixkv.prompts import Prompt

PROMPT = Prompt(list(range(100, 200)))
SAMPLED = SamplingParams(seed=5, max_tokens=60, ignore_eos=True)


async def answer(replicas: ReplicaSet, params: SamplingParams = SAMPLED) -> list[int]:
    return await tokens(replicas.streams, PROMPT, params)


async def begun_on(replicas: ReplicaSet, server: LocalReplica, steps: HeldSteps, name: str) -> asyncio.Task[list[int]]:
    """An answer that has tokens of this replica, and gets no more until its steps are allowed."""
    task = asyncio.ensure_future(answer(replicas))
    steps.allow(8)
    await until(lambda: server.llm.stats.num_decoding and replicas.streams.num_streams(name))
    attempt = next(iter(replicas.streams._attempts[replicas._clients[name]]))
    await until(lambda: attempt.begun)
    return task
