"""Conversations that do not fit the pool: in waves, to measure throughput, and at random times, to measure first tokens.

In waves, the engine is never idle, and one slow request makes all of its wave slow: the first prompts of eight conversations
are computed by one engine, whatever tier it has. So what users wait for is measured with conversations that begin at random
times and continue some seconds after each answer, so long that others have taken their blocks in the pool. They arrive as
fast as an engine without tiers can just sustain: at nine tenths of what it served in waves.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.async_llm import AsyncLLM
from radixkv.bench.common.percentiles import p99
from radixkv.bench.tiers.fresh_engine import BLOCK_SIZE, fresh_llm, random_tokens, seconds_to_first_token
from radixkv.llm import LLM
from radixkv.outputs import RequestOutput
from radixkv.sampling_params import SamplingParams

# A conversation is about a document, in short questions and answers: caching gains little where much is generated.
DOCUMENT_TOKENS = 1000
QUESTION_TOKENS = 48
ANSWER_TOKENS = 16
# Rate of arrivals over the rate at which the engine without tiers serves waves.
LOAD = 0.9


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Conversations that do not fit the pool.

    Attributes:
        tier: what is below the pool; "none": nothing; "larger pool": nothing, because the pool holds all of them.
        requests_per_second: turns that were served.
        tokens_per_second: prompt and generated tokens of them.
        cached_share: of the prompt tokens.
        ttft_p50, ttft_p99: seconds from the beginning of a wave to the first token.
    """

    tier: str
    requests_per_second: float
    tokens_per_second: float
    cached_share: float
    ttft_p50: float
    ttft_p99: float


@dataclass(frozen=True, slots=True)
class MeasuredArrivals:
    """The same arrivals over one kind of tier.

    Attributes:
        tier: what is below the pool; "none": nothing.
        requests_per_second: that arrive on average, when as many conversations end as begin.
        cached_share: of the prompt tokens.
        ttft_p50, ttft_p99: seconds from a request's arrival to its first token.
    """

    tier: str
    requests_per_second: float
    cached_share: float
    ttft_p50: float
    ttft_p99: float


def measure_working_set(model: str | None, tier: str, folder: Path, conversations: int, turns: int) -> WorkingSet:
    """Answer conversations turn by turn, in waves of eight; the pool holds a quarter of their length in the end."""
    rng = random.Random(2)
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    outputs: list[RequestOutput] = []
    with fresh_llm(model, **_options(tier, folder, conversations, turns)) as llm:
        vocabulary = llm.engine.loaded.vocab_size
        histories = [random_tokens(rng, DOCUMENT_TOKENS, vocabulary) for _ in range(conversations)]
        began = time.monotonic()
        for _ in range(turns):
            for history in histories:
                history += random_tokens(rng, QUESTION_TOKENS, vocabulary)
            for start in range(0, conversations, 8):
                wave = histories[start : start + 8]
                prompts: list[Any] = [{"prompt_token_ids": list(history)} for history in wave]
                answered = llm.generate(prompts, params, use_tqdm=False)
                for history, output in zip(wave, answered, strict=True):
                    history += output.outputs[0].token_ids
                outputs += answered
        seconds = time.monotonic() - began
    served = sum(len(output.prompt_token_ids) + len(output.outputs[0].token_ids) for output in outputs)
    return WorkingSet(tier, len(outputs) / seconds, served / seconds, *_cached_and_first_tokens(outputs))


def measure_arrivals(
    model: str | None, requests_per_second: float, folder: Path, conversations: int, turns: int
) -> list[MeasuredArrivals]:
    """The same conversations at the same times, over no tier and each kind.

    They begin as a Poisson process. During the pause of one, half as many requests arrive as there are conversations.

    Args:
        model: as for `LLM`.
        requests_per_second: when as many conversations end as begin.
        folder: for the disk tier.
        conversations: how many; the pool holds a quarter of their length in the end.
        turns: of each.
    """
    rows = []
    for tier in ("none", "host", "disk"):
        with fresh_llm(model, **_options(tier, folder, conversations, turns)) as llm:
            rng = random.Random(5)
            gaps = [rng.expovariate(requests_per_second / turns) for _ in range(conversations)]
            pause = conversations / 2 / requests_per_second
            outputs = asyncio.run(_converse_all(llm, list(itertools.accumulate(gaps)), pause, turns))
        rows.append(MeasuredArrivals(tier, requests_per_second, *_cached_and_first_tokens(outputs)))
    return rows


def _cached_and_first_tokens(outputs: list[RequestOutput]) -> tuple[float, float, float]:
    """The cached share of all prompt tokens, and the median and the 99th percentile of the seconds to first tokens."""
    cached = sum(output.num_cached_tokens for output in outputs)
    prompted = sum(len(output.prompt_token_ids) for output in outputs)
    seconds = [seconds_to_first_token(output) for output in outputs]
    return cached / prompted, statistics.median(seconds), p99(seconds)


async def _converse_all(llm: LLM, starts: list[float], pause: float, turns: int) -> list[RequestOutput]:
    """The last output of each turn of conversations that start after so many seconds; shuts the engine down."""
    vocabulary = llm.engine.loaded.vocab_size
    async with AsyncLLM(llm) as engine:
        answers = await asyncio.gather(
            *(
                _converse(engine, _script(random.Random(number), turns, vocabulary), start, pause)
                for number, start in enumerate(starts)
            )
        )
    return list(itertools.chain.from_iterable(answers))


def _script(rng: random.Random, turns: int, vocabulary: int) -> list[list[int]]:
    """What one user says in each turn; first a document with the question."""
    document = random_tokens(rng, DOCUMENT_TOKENS, vocabulary)
    questions = [random_tokens(rng, QUESTION_TOKENS, vocabulary) for _ in range(turns)]
    return [document + questions[0], *questions[1:]]


async def _converse(engine: AsyncLLM, script: list[list[int]], start: float, pause: float) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    history: list[int] = []
    outputs: list[RequestOutput] = []
    await asyncio.sleep(start)
    for question in script:
        if outputs:
            await asyncio.sleep(pause)
        history += question
        async for output in engine.generate({"prompt_token_ids": list(history)}, params):
            history += output.outputs[0].token_ids
        outputs.append(output)
    return outputs


def _options(tier: str, folder: Path, conversations: int, turns: int) -> dict[str, Any]:
    """Options of an engine with a tier whose pool holds a quarter of the conversations, or all for "larger pool"."""
    length = DOCUMENT_TOKENS + turns * (QUESTION_TOKENS + ANSWER_TOKENS)
    needed = conversations * (length // BLOCK_SIZE + 1)
    below: dict[str, dict[str, Any]] = {
        "none": {},
        "larger pool": {},
        "host": {"host_cache_size": "16GiB"},
        "disk": {"disk_cache": folder, "disk_cache_size": "16GiB"},
    }
    return {"num_blocks": needed + conversations if tier == "larger pool" else needed // 4, **below[tier]}
