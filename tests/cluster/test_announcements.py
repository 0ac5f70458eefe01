"""Readers of a replica's announcements: one that waits gets loads of its engine, and one that leaves is removed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from support.async_streams import GREEDY, prompts, running_llm
from support.async_streams import tokens_of as stream_tokens
from support.held_steps import HeldSteps
from support.pretended_replicas import until
from support.time_limit import HANGING
from support.tiny_engine import tiny

from radixkv.cluster.announcements import Announcements
from radixkv.cluster.counters import counters_of
from radixkv.cluster.load import ReplicaLoad
from radixkv.cluster.records import Kind, RecordReader, decode_hashes, decode_load


async def test_loads_are_sent_during_a_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.cluster.announcements._SECONDS_BETWEEN_LOADS", 0.0)
    offline = tiny()
    steps = HeldSteps(offline.engine)
    async with running_llm(offline) as llm:
        answer = asyncio.ensure_future(stream_tokens(llm, prompts(1)[0]))
        while not steps.is_holding:
            await asyncio.sleep(0)
        async with aclosing(Announcements(llm).subscribe(0)) as records:
            kinds = [(await anext(records))[0] for _ in range(3)]
            assert kinds == [Kind.LOAD] * 3
            steps.allow_all()
            while (await anext(records))[0] != Kind.HELD:
                pass
        await answer


async def test_a_replica_that_caches_blocks_with_each_step_reports_its_load_no_more_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each step's counters were sent to every ingress: a tenth of a millisecond of processor time for each, at both ends."""
    monkeypatch.setattr("radixkv.cluster.announcements._SECONDS_BETWEEN_LOADS", HANGING)
    alone = tiny()
    alone.generate(prompts(1), GREEDY, use_tqdm=False)
    expected = set(alone.engine.cache.block_hashes().tolist())
    async with running_llm() as llm:
        reader, kinds, held = RecordReader(), list[Kind](), set[int]()
        async with aclosing(Announcements(llm).subscribe(0)) as announced:
            answer: asyncio.Future[list[list[int]]] | None = None
            async for data in announced:
                for kind, payload in reader.read(data):
                    kinds.append(kind)
                    held.update(decode_hashes(payload) if kind is Kind.STORED else ())
                if kinds[-1] is Kind.LOAD and answer is None:
                    answer = asyncio.ensure_future(stream_tokens(llm, prompts(1)[0]))
                if held == expected:
                    break
            assert answer is not None
            await answer
        assert (kinds.count(Kind.LOAD), kinds.count(Kind.STORED) > 2) == (1, True)


async def test_a_drained_engine_s_last_counts_are_sent_although_it_ends_while_a_load_is_sent() -> None:
    """It was taken to have nothing more to send: the ingresses' totals lacked its last steps for ever."""
    offline = tiny()
    steps = HeldSteps(offline.engine)
    async with running_llm(offline) as llm:
        reader = RecordReader()
        async with aclosing(Announcements(llm).subscribe(0)) as announced:

            async def load_that(matches: Callable[[ReplicaLoad], bool]) -> ReplicaLoad | None:
                async for data in announced:
                    for kind, payload in reader.read(data):
                        if kind is Kind.LOAD and matches(load := decode_load(payload)):
                            return load
                return None

            assert await load_that(lambda load: not load.draining)
            answer = asyncio.ensure_future(stream_tokens(llm, prompts(1)[0]))
            await until(lambda: steps.is_holding)
            llm.start_draining()
            assert await load_that(lambda load: load.draining)
            steps.allow_all()
            await answer
            assert await load_that(lambda load: load.counters == counters_of(llm.stats))


async def test_a_reader_that_leaves_while_its_feed_begins_is_forgotten() -> None:
    observers: list[object] = []
    cache = SimpleNamespace(
        block_size=16, block_hashes=list, add_observer=observers.append, remove_observer=observers.remove
    )
    begun = asyncio.Event()

    class Llm:
        death = None

        async def call(self, function: Callable[[Any], Any]) -> Any:
            result = function(SimpleNamespace(cache=cache))
            if not begun.is_set():
                begun.set()
                await asyncio.Event().wait()
            return result

    llm: Any = Llm()
    announcements = Announcements(llm)
    reading = asyncio.ensure_future(anext(announcements.subscribe(0)))
    await begun.wait()
    assert observers
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await until(lambda: not observers)
    assert not announcements._wakers
