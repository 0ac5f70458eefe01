"""An `AsyncLLM` of a tiny model for one test, in which nothing may be left afterwards."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from support.model_zoo import VOCAB_SIZE
from support.time_limit import HANGING
from support.tiny_engine import tiny

from radixkv import LLM, AsyncLLM, SamplingParams
from radixkv.engine.engine import Engine

ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def prompts(count: int, length: int = 30) -> list[dict[str, Any]]:
    rng = random.Random(length)
    stem = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
    return [{"prompt_token_ids": [*stem[: rng.randint(1, length)], 3 + number % 100]} for number in range(count)]


@asynccontextmanager
async def running_llm(offline: LLM | None = None, **options: Any) -> AsyncIterator[AsyncLLM]:
    """An AsyncLLM for as long as a test may take; when the test ends, nothing may be left in the engine."""
    async with asyncio.timeout(HANGING), AsyncLLM(offline or tiny(), **options) as llm:
        yield llm
        await assert_empty(llm)


async def until(condition: Callable[[], object]) -> None:
    """Let everything else go on until a condition holds, and go on at once then."""
    while not condition():
        await asyncio.sleep(0)


async def assert_empty(llm: AsyncLLM) -> None:
    def look(engine: Engine) -> tuple[bool, int]:
        engine.cache.check()
        in_use = engine.cache.num_blocks - engine.cache.num_available_blocks
        return engine.has_unfinished_requests or bool(engine.scheduler.running or engine.scheduler.waiting), in_use

    assert await llm.call(look) == (False, 0)
    assert llm.num_unfinished == 0


async def tokens_of(llm: AsyncLLM, prompt: Any, params: SamplingParams = GREEDY) -> list[list[int]]:
    samples: dict[int, list[int]] = {}
    async for output in llm.generate(prompt, params):
        for sample in output.outputs:
            samples.setdefault(sample.index, []).extend(sample.token_ids)
    return [samples[index] for index in sorted(samples)]
