"""End-to-end workloads: prompts of exact lengths, the same in every run."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from radixkv.bench.common.words import WORDS


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are sent together, wave after wave, and how each is answered.

    Attributes:
        waves: lists of prompts, as token ids; a wave is sent when the one before has been answered. With ``chained``, a
            wave's prompts are appended to the conversations so far, answers included.
        new_tokens: tokens per answer.
        num_samples: answers per prompt.
        beam_width: of beam search; 0: greedy or sampled decoding.
        warm: run once before, unmeasured, so that all prompts are cached.
        warm_prefix: number of leading tokens of the prompts to cache before the measurement.
    """

    name: str
    waves: list[list[list[int]]]
    new_tokens: int
    chained: bool = False
    num_samples: int = 1
    beam_width: int = 0
    warm: bool = False
    warm_prefix: int = 0


def make_workloads(tokenizer: Any) -> list[Workload]:
    """All end-to-end workloads."""
    rng = random.Random(7)

    def text(length: int) -> list[int]:
        words = " ".join(rng.choices(WORDS, k=2 * length))
        ids: list[int] = tokenizer(words, add_special_tokens=False)["input_ids"]
        return ids[:length]

    system = text(1000)
    chats = [[system + text(40) for _ in range(16)]]
    stems = [text(120) for _ in range(6)]
    turns = [stems] + [[text(30) for _ in range(6)] for _ in range(3)]
    return [
        Workload("16 chats, one 1,000-token system prompt, 64 new", chats, 64),
        Workload("the same, all prompts cached", chats, 64, warm=True),
        Workload("16 unrelated prompts of 240, 64 new", [[text(240) for _ in range(16)]], 64),
        Workload("one stream of 128 tokens", [[text(16)]], 128),
        Workload("6 conversations of 4 turns, 48 new each", turns, 48, chained=True),
        Workload("n = 8 samples of 64, 1,000-token prompt", [[text(1000)]], 64, num_samples=8),
        Workload("beam 4, 48 tokens, 1,000-token prompt", [[text(1000)]], 48, beam_width=4),
        Workload("first token, 1,000-token prompt, cold", [[text(1000)]], 1),
        Workload("first token, system prompt cached", [[system + text(40)]], 1, warm_prefix=1000),
    ]
