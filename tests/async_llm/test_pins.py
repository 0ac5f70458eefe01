"""Pins, and forgetting what is cached, in an asyncio program."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.async_streams import ENDLESS, GREEDY, prompts, running_llm, tokens_of
from support.event_replay import replay_events
from support.tiny_engine import tiny

from radixkv import AsyncLLM, SamplingParams
from radixkv.cache import PinQuotaExceeded
from radixkv.cache.node import Node
from radixkv.cache.observer import TreeObserver
from radixkv.engine.clearing import ALL_NAMESPACES, NamespaceSelection
from radixkv.engine.stats import EngineStats

PINNED = {"prompt_token_ids": list(range(3, 23))}


async def test_a_pinned_prompt_outlives_others_until_it_is_released() -> None:
    async def cached(llm: AsyncLLM) -> int:
        return await llm.call(lambda engine: engine.cache.match(PINNED["prompt_token_ids"]))

    async def fill(llm: AsyncLLM) -> None:
        for start in range(30, 90, 4):
            await tokens_of(llm, {"prompt_token_ids": list(range(start, start + 20))})

    async with running_llm(tiny(num_blocks=24)) as llm:
        pin = await llm.pin(PINNED)
        assert (pin.num_tokens, await llm.pins()) == (20, [pin])
        await fill(llm)
        assert await cached(llm) == 20
        await llm.unpin(pin)
        assert await llm.pins() == []
        await fill(llm)
        assert await cached(llm) == 0


async def test_pins_are_bounded_and_apart_by_salt_and_end_when_all_is_forgotten() -> None:
    async with running_llm(tiny(num_blocks=24)) as llm:
        with pytest.raises(PinQuotaExceeded):
            await llm.pin({"prompt_token_ids": [30 + n for n in range(60)]})
        with pytest.raises(
            TypeError, match="prompt: expected a string, token ids, a dictionary or a list of messages, got int"
        ):
            await llm.pin(5)  # type: ignore[arg-type]
        pin = await llm.pin(PINNED, ttl=1000.0, cache_salt="ann")
        assert await llm.call(lambda engine: engine.cache.match(PINNED["prompt_token_ids"])) == 0
        assert await llm.reset_prefix_cache()
        assert pin.released
        assert await llm.call(lambda engine: engine.cache.num_free_blocks) == 24


async def test_the_statistics_of_an_idle_engine_no_longer_count_a_pin_that_has_expired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They used to count it until the next request came."""
    offline, now = tiny(), [0.0]
    monkeypatch.setattr(offline.engine.cache._pins, "_clock", lambda: now[0])
    async with running_llm(offline) as llm:
        expired = asyncio.Event()

        def note(stats: EngineStats) -> None:
            if stats.num_blocks_in_use == 0:
                expired.set()

        far_off = await llm.pin({"prompt_token_ids": list(range(30, 50))}, ttl=1e300)
        await llm.unpin(far_off)
        await llm.pin(PINNED, ttl=0.01)
        assert llm.stats.num_blocks_in_use == 5
        llm.on_step = note
        now[0] = 1.0
        await expired.wait()
        assert llm.stats.num_blocks_in_use == 0


async def test_a_running_request_keeps_its_blocks_when_all_is_forgotten() -> None:
    async with running_llm(tiny()) as llm:
        async with contextlib.aclosing(llm.generate(prompts(1)[0], ENDLESS)) as stream:
            await anext(stream)
            assert not await llm.reset_prefix_cache()
            await anext(stream)
        assert await llm.reset_prefix_cache()


async def test_what_is_cleared_is_published_at_once(tmp_path: Path) -> None:
    """A router used to go on taking an idle engine for one that has the blocks."""
    zmq = pytest.importorskip("zmq")
    msgspec = pytest.importorskip("msgspec")
    replay = f"ipc://{tmp_path}/replay"

    def types(context: Any) -> list[str]:
        return [
            event["type"]
            for _, batch in replay_events(context, replay, 0)
            for event in msgspec.msgpack.decode(batch)[1]
        ]

    async with running_llm(
        tiny(kv_events_endpoint=f"ipc://{tmp_path}/events", kv_events_replay_endpoint=replay)
    ) as llm:
        context: Any = zmq.Context()
        try:
            for name in (None, ""):
                await tokens_of(llm, PINNED)
                assert types(context)[-1] == "BlockStored"
                await llm.clear(NamespaceSelection(name))
                assert types(context)[-1] != "BlockStored"
        finally:
            context.destroy(linger=0)


@pytest.mark.parametrize(
    ("prompt", "ttl", "error", "message", "options"),
    [
        (PINNED, None, ValueError, "^pin: nothing is cached .*enable_prefix_caching=False", {"enable_prefix_caching": False}),
        (PINNED, -1, ValueError, "^ttl: expected a finite number of seconds above 0, or None, got -1", {}),
        ({**PINNED, "cache": {"write": False}}, None, ValueError, "^cache: expected 'write' to be True .*got False", {}),
        ([500], None, ValueError, "^prompt_token_ids: 500 is outside the vocabulary", {}),
        (PINNED, None, PinQuotaExceeded, "5 blocks would be pinned, 4 may be", {"num_blocks": 8}),
    ],
)  # fmt: skip
async def test_nothing_is_computed_for_a_pin_that_is_refused(
    prompt: Any, ttl: float | None, error: type[Exception], message: str, options: dict[str, Any]
) -> None:
    offline = tiny(**options)
    with pytest.raises(error, match=message):
        offline.pin(prompt, ttl)
    async with running_llm(offline) as llm:
        with pytest.raises(error, match=message):
            await llm.pin(prompt, ttl)
    assert offline.engine.num_steps == 0


async def test_a_pin_changes_no_answer_of_a_request_without_a_seed() -> None:
    """It took the seed that the next such request would have had."""
    drawn = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    (expected,) = tiny(seed=5).generate([PINNED], drawn, use_tqdm=False)
    offline = tiny(seed=5)
    offline.unpin(offline.pin(PINNED))
    async with running_llm(offline) as llm:
        await llm.unpin(await llm.pin(PINNED))
        assert await tokens_of(llm, PINNED, drawn) == [expected.outputs[0].token_ids]


def test_to_forget_everything_is_said_once() -> None:
    """It used to be said for each namespace first, so that a disk overwrote each block before freeing all of its space."""
    cleared: list[str | None] = []

    class Observer(TreeObserver):
        def on_clear(self, namespace: str | None, nodes: Sequence[Node]) -> None:
            cleared.append(namespace)

    llm = tiny()
    for salt in ("ann", "bob"):
        llm.generate({**PINNED, "cache_salt": salt}, GREEDY, use_tqdm=False)
    llm.engine.cache.add_observer(Observer())
    held = llm.engine.cache.num_held_blocks
    assert llm.engine.clear(ALL_NAMESPACES).freed_blocks == held > 0
    assert cleared == [None]
