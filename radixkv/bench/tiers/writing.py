"""What writing to a disk costs prompts that are never repeated."""

from __future__ import annotations

import os
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.bench.tiers.fresh_engine import BLOCK_SIZE, random_tokens
from radixkv.llm import LLM
from radixkv.sampling_params import SamplingParams

UNRELATED_PROMPTS = 16
UNRELATED_TOKENS = 240
UNRELATED_ANSWER = 64


@dataclass(frozen=True, slots=True)
class Writing:
    """What writing costs 16 unrelated prompts.

    Attributes:
        without_tiers: tokens generated a second, the median of rounds.
        write_back_ratio, write_through_ratio: tokens a second with a disk over those without in the same round, medians of
            rounds: a machine's speed drifts more from minute to minute than writing costs.
    """

    without_tiers: float
    write_back_ratio: float
    write_through_ratio: float


def measure_writing(model: str | None, folder: Path, rounds: int) -> Writing:
    """Prompts that share nothing and never recur, through a pool that holds one round of them, so that all are written."""
    rng = random.Random(3)
    params = SamplingParams(max_tokens=UNRELATED_ANSWER, temperature=0.0, ignore_eos=True)
    num_blocks = -(-UNRELATED_PROMPTS * (UNRELATED_TOKENS + UNRELATED_ANSWER) // BLOCK_SIZE) + UNRELATED_PROMPTS
    disk: dict[str, Any] = {"disk_cache_size": "16GiB"}
    ways: dict[str, dict[str, Any]] = {
        "none": {},
        "write-back": {**disk, "disk_cache": folder / "back", "cache_write_policy": "write-back"},
        "write-through": {**disk, "disk_cache": folder / "through", "cache_write_policy": "write-through"},
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    llms = {way: LLM(model, block_size=BLOCK_SIZE, num_blocks=num_blocks, **options) for way, options in ways.items()}
    try:
        vocabulary = llms["none"].engine.loaded.vocab_size
        os.sync()  # otherwise the system would write what was measured before meanwhile
        for number in range(rounds + 1):
            # In both orders: what one way leaves to be written may delay the next.
            for way, llm in list(llms.items())[:: 1 if number % 2 else -1]:
                prompts: list[Any] = [
                    {"prompt_token_ids": random_tokens(rng, UNRELATED_TOKENS, vocabulary)}
                    for _ in range(UNRELATED_PROMPTS)
                ]
                began = time.monotonic()
                llm.generate(prompts, params, use_tqdm=False)
                if number:  # the first round warms up, and fills the pool
                    rates[way].append(UNRELATED_PROMPTS * UNRELATED_ANSWER / (time.monotonic() - began))
    finally:
        for llm in llms.values():
            llm.shutdown(0.0)
    without = rates["none"]
    share = {
        way: statistics.median(rate / base for rate, base in zip(values, without, strict=True))
        for way, values in rates.items()
    }
    return Writing(statistics.median(without), share["write-back"], share["write-through"])
