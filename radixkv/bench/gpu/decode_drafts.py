"""What drafts cost a decoding step on a GPU, where it is known beforehand how many of them are right.

The model's output layer is all zeros, so every token is 0 however a GPU rounds, and a draft is right where it says 0.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from radixkv.bench.gpu.report import GpuReport
from radixkv.drafting import Draft, DraftContext, Drafter
from radixkv.engine.speculation import Speculator
from radixkv.llm import LLM
from radixkv.scheduling.batch import Batch

DRAFTS = 4
RATES = (0.0, 0.5, 0.8)
OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "speculative_config": {"num_speculative_tokens": DRAFTS},
        # Drafts need the last tokens on the host before the next step; so the steps without drafts fetch them there, too.
        "async_scheduling": False,
    }
)


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """A decoding step.

    Attributes:
        drafts: per sequence and step, on average.
        median_us: from the end of one step to the end of the next, on the host's clock.
        tokens_per_step: per sequence; 1 without drafts.
    """

    drafts: float
    median_us: float
    tokens_per_step: float
    tokens_per_s: float


class ForcedDrafts(Drafter):
    """Drafts whose tokens are right at a given rate.

    Args:
        rate: probability that a token is right, from 0 to 1.
    """

    source = "forced"

    def __init__(self, rate: float) -> None:
        self._random = random.Random(0)
        self._rate = rate

    def draft(self, context: DraftContext, max_tokens: int) -> Draft:
        return Draft([0 if self._random.random() < self._rate else 1 for _ in range(min(DRAFTS, max_tokens))])


class AlwaysAskingSpeculator(Speculator):
    """Asks for drafts in every step, however often they were wrong."""

    def learn(self, batch: Batch) -> None:
        super().learn(batch)
        for chunk in batch.chunks:
            if chunk.sequence.drafts is not None:
                chunk.sequence.drafts.num_wrong = 0


def row_names(prefix: str) -> dict[str, float | None]:
    """The names of the rows, each with the rate at which its drafts are right; None: it has no drafts."""
    rated = {f"{prefix}, {DRAFTS} drafts each, {rate:.0%} right, step": rate for rate in RATES}
    return {f"{prefix}, no drafts, step": None, **rated}


def force_drafts(llm: LLM, rate: float | None) -> None:
    """Make every step verify `ForcedDrafts` and no others; ``rate`` None: no drafts at all."""
    engine = llm.engine
    if rate is None:
        engine._speculator = None
        return
    # By this clock all steps take equally long, so that every draft seems worth its row.
    ticks = itertools.count()
    engine._speculator = AlwaysAskingSpeculator(
        [ForcedDrafts(rate)],
        engine.scheduler.blocks,
        max_tokens=DRAFTS,
        max_rows=engine.capacity.max_num_batched_tokens,
        max_batched_tokens=engine.capacity.max_num_batched_tokens,
        vocab_size=engine.loaded.vocab_size,
        clock=lambda: float(next(ticks)),
    )


def measure_drafts(
    report: GpuReport,
    llm: LLM,
    names: dict[str, float | None],
    decoding: Callable[[], AbstractContextManager[None]],
    num_steps: int,
) -> None:
    """Measure the rows of `row_names`. A row that is about drafts fails if one of its steps had none.

    Args:
        report: to which the rows are added.
        llm: with `OPTIONS`.
        names: of the rows.
        decoding: enters a context in which each step decodes one token of all sequences.
        num_steps: how many to time.
    """
    for name, rate in names.items():
        if not report.wants(name):
            continue
        force_drafts(llm, rate)
        with report.failing_alone(name), decoding():
            report.measure(name, partial(_measure, llm, num_steps))


def _measure(llm: LLM, num_steps: int) -> DraftedStep:
    engine = llm.engine
    sequences = [sequence for group in engine.scheduler.running for sequence in group.sequences]

    def count() -> int:
        return sum(len(sequence.token_ids) for sequence in sequences)

    def count_drafts() -> int:
        drafts = engine._speculator
        return 0 if drafts is None else sum(counts.drafted for counts in drafts.counts.values())

    torch.cuda.synchronize()
    before, drafts_after, ends = count(), [count_drafts()], [time.perf_counter()]
    for _ in range(num_steps):
        engine.step()
        ends.append(time.perf_counter())
        drafts_after.append(count_drafts())
    if engine._speculator is not None:
        without = sum(later == earlier for earlier, later in itertools.pairwise(drafts_after))
        if without:
            raise RuntimeError(f"{without} of {num_steps} steps were without drafts: expected some in each")
    seconds = statistics.median(stop - begin for begin, stop in itertools.pairwise(ends))
    tokens, drafts = (count() - before) / num_steps, (drafts_after[-1] - drafts_after[0]) / num_steps
    return DraftedStep(drafts / len(sequences), seconds * 1e6, tokens / len(sequences), tokens / seconds)
