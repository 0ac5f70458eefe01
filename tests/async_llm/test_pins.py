"""Pins, and forgetting what is cached, in an asyncio program."""

from __future__ import annotations

import contextlib

import pytest
from support.async_streams import ENDLESS, prompts, run, tiny, tokens_of

from radixkv import AsyncLLM
from radixkv.cache import PinQuotaExceeded

PINNED = {"prompt_token_ids": list(range(3, 23))}


def test_a_pinned_prompt_outlives_others_until_it_is_released() -> None:
    async def cached(llm: AsyncLLM) -> int:
        return await llm.call(lambda engine: engine.cache.match(PINNED["prompt_token_ids"]))

    async def fill(llm: AsyncLLM) -> None:
        for start in range(30, 90, 4):
            await tokens_of(llm, {"prompt_token_ids": list(range(start, start + 20))})

    async def test(llm: AsyncLLM) -> None:
        pin = await llm.pin(PINNED)
        assert (pin.num_tokens, await llm.pins()) == (20, [pin])
        await fill(llm)
        assert await cached(llm) == 20
        await llm.unpin(pin)
        assert await llm.pins() == []
        await fill(llm)
        assert await cached(llm) == 0

    run(test, tiny(num_blocks=24))


def test_pins_are_bounded_and_apart_by_salt_and_end_when_all_is_forgotten() -> None:
    async def test(llm: AsyncLLM) -> None:
        with pytest.raises(PinQuotaExceeded):
            await llm.pin({"prompt_token_ids": [30 + n for n in range(60)]})
        with pytest.raises(TypeError, match="prompt: expected a string, a dictionary or a list of messages, got int"):
            await llm.pin(5)  # type: ignore[arg-type]
        pin = await llm.pin(PINNED, ttl=1000.0, cache_salt="ann")
        assert await llm.call(lambda engine: engine.cache.match(PINNED["prompt_token_ids"])) == 0
        assert await llm.reset_prefix_cache()
        assert pin.released
        assert await llm.call(lambda engine: engine.cache.num_free_blocks) == 24

    run(test, tiny(num_blocks=24))


def test_a_running_request_keeps_its_blocks_when_all_is_forgotten() -> None:
    async def test(llm: AsyncLLM) -> None:
        async with contextlib.aclosing(llm.generate(prompts(1)[0], ENDLESS)) as stream:
            await anext(stream)
            assert not await llm.reset_prefix_cache()
            await anext(stream)
        assert await llm.reset_prefix_cache()

    run(test, tiny())
