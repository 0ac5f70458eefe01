"""Time to the first token of a prompt whose keys and values lie in host memory, against computing them and against the pool.

The pool holds little more than one of the longest prompts. A prompt that fills it evicts the measured one to the host, from
where that is loaded when it is sent again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.table import Table

from radixkv.bench.gpu.report import GpuReport
from radixkv.llm import LLM
from radixkv.sampling_params import SamplingParams

LENGTHS = (1000, 7000)
TIMES = 7
_BLOCK_SIZE = 16
_POOL_TOKENS = 8192
_FIRST_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Median time from the request to its first token.

    Attributes:
        loaded_tokens: how many tokens of a prompt came from the host.
    """

    seconds: float
    loaded_tokens: int


def row_names() -> dict[str, tuple[int, str]]:
    """The names of the rows, each with the length of its prompts and where their keys and values are."""
    kinds = ("computed", "loaded from the host", "in the pool")
    return {f"host tier: {length:,} tokens, {kind}": (length, kind) for length in LENGTHS for kind in kinds}


def measure_host_tier(report: GpuReport, table: Table, model: Any) -> None:
    """Measure the rows by an engine of its own. One about the host fails if its prompts were not loaded from there."""
    llm = LLM(
        model, max_model_len=_POOL_TOKENS, max_num_seqs=1, num_blocks=_POOL_TOKENS // _BLOCK_SIZE, block_size=_BLOCK_SIZE,
        host_cache_size="16GiB", cache_write_policy="write-back", speculative_config=None,
    )  # fmt: skip
    fresh = _fresh_prompts(llm.engine.loaded.vocab_size)
    measure = {"computed": _computed, "loaded from the host": _loaded, "in the pool": _in_the_pool}
    try:
        for length in LENGTHS:
            _first_token(llm, fresh(length))  # the first launch of a kernel loads it
        for name, (length, kind) in row_names().items():
            row = report.measure(name, partial(measure[kind], llm, fresh, length))
            if row is not None:
                table.add_row(name, "", "", f"{row.seconds * 1e6:,.0f}", "", "", "")
    finally:
        llm.shutdown()


def _fresh_prompts(vocab_size: int) -> Callable[[int], list[int]]:
    rng = np.random.default_rng(0)
    return lambda length: rng.integers(3, vocab_size, length).tolist()


def _computed(llm: LLM, fresh: Callable[[int], list[int]], length: int) -> FirstToken:
    return _median(_first_token(llm, fresh(length)) for _ in range(TIMES))


def _in_the_pool(llm: LLM, fresh: Callable[[int], list[int]], length: int) -> FirstToken:
    prompt = fresh(length)
    _first_token(llm, prompt)
    return _median(_first_token(llm, prompt) for _ in range(TIMES))


def _loaded(llm: LLM, fresh: Callable[[int], list[int]], length: int) -> FirstToken:
    prompt, evicts = fresh(length), fresh(_POOL_TOKENS - _BLOCK_SIZE)
    _first_token(llm, prompt)

    def one() -> FirstToken:
        _first_token(llm, evicts)
        assert llm.engine.tiers is not None
        llm.engine.tiers.flush(60.0)
        taken = _first_token(llm, prompt)
        # The pool's last free block leaves one of the prompt's in place, and the last token is always computed.
        if taken.loaded_tokens < length - 3 * _BLOCK_SIZE:
            raise RuntimeError(f"only {taken.loaded_tokens} of {length} tokens were loaded")
        return taken

    return _median(one() for _ in range(TIMES))


def _first_token(llm: LLM, prompt: list[int]) -> FirstToken:
    torch.cuda.synchronize()
    began = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": prompt}], _FIRST_TOKEN, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert output.metrics is not None
    return FirstToken(seconds, sum(output.metrics.loaded_tokens.values()))


def _median(taken: Iterator[FirstToken]) -> FirstToken:
    seconds, loaded = zip(*((one.seconds, one.loaded_tokens) for one in taken), strict=True)
    return FirstToken(statistics.median(seconds), statistics.median_low(loaded))
