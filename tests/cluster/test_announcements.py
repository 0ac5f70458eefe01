"""Readers of a replica's announcements: one that waits hears of its engine, and one that leaves is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from support.async_streams import prompts, run
from support.async_streams import tokens_of as stream_tokens
from support.held_steps import HeldSteps
from support.pretended_replicas import until
from support.tiny_engine import tiny

from radixkv import AsyncLLM
from radixkv.cluster.announcements import Announcements
from radixkv.cluster.records import Kind


def test_a_reader_hears_of_an_engine_in_a_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.cluster.announcements._SECONDS_BETWEEN_LOADS", 0.0)
    offline = tiny()
    steps = HeldSteps(offline.engine)

    async def test(llm: AsyncLLM) -> None:
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

    run(test, offline)


def test_a_reader_that_leaves_while_its_feed_begins_is_forgotten() -> None:
    async def main() -> None:
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

    asyncio.run(main())
