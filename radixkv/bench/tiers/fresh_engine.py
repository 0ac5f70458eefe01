"""Engines for one measurement each, and their prompts."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from radixkv.llm import LLM
from radixkv.outputs import RequestOutput

BLOCK_SIZE = 16


@contextmanager
def fresh_llm(model: str | None, **options: Any) -> Iterator[LLM]:
    """An engine of its own, gone afterwards, as in a new process; model files are in the page cache in any case."""
    llm = LLM(model, block_size=BLOCK_SIZE, **options)
    try:
        with llm:
            yield llm
    finally:
        del llm
        gc.collect()


def random_tokens(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    """Token ids that repeat by chance alone."""
    return [rng.randrange(10, vocabulary) for _ in range(count)]


def seconds_to_first_token(output: RequestOutput) -> float:
    """From a request's arrival."""
    assert output.metrics.first_token_time is not None
    return output.metrics.first_token_time - output.metrics.arrival_time
