"""First tokens of prompts that an earlier engine has computed: after a restart, and over a store that machines share."""

from __future__ import annotations

import random
import secrets
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.bench.tiers.fresh_engine import BLOCK_SIZE, fresh_llm, random_tokens, seconds_to_first_token
from radixkv.llm import LLM
from radixkv.sampling_params import SamplingParams

# Tokens of a prompt that is known, and of a new question behind it; without one, the prompt is repeated word for word.
RESTARTS = ((1000, 0), (1000, 20), (7000, 20))
# What takes little time, or differs by little, is repeated this many times as often as the rest.
MORE_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Restart:
    """First tokens of prompts of one length, in seconds, medians.

    Attributes:
        question_tokens: new ones behind the prompt.
        loaded: after a restart, from the disk.
        hot: the same prompt once more, with another question.
        cold: another one, sent for the first time.
        cold_without_tiers: another one, by an engine that has no tiers.
        cached_tokens: that the loaded ones reused.
    """

    prompt_tokens: int
    question_tokens: int
    loaded: float
    hot: float
    cold: float
    cold_without_tiers: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Shared:
    """First tokens over a store that several machines share, in seconds, medians.

    Attributes:
        loaded: of prompts that another engine has computed.
        cold: of others.
        cached_tokens: that the loaded ones reused.
    """

    prompt_tokens: int
    loaded: float
    cold: float
    cached_tokens: int


def measure_restart(model: str | None, folder: Path, rounds: int) -> list[Restart]:
    """First tokens after a restart over a folder that an earlier engine has written."""
    rng = random.Random(1)
    options: dict[str, Any] = {"disk_cache": folder, "disk_cache_size": "16GiB", "num_blocks": 2 * _blocks(rounds)}
    with fresh_llm(model, **options) as llm:
        vocabulary = llm.engine.loaded.vocab_size
        known = {
            case: [random_tokens(rng, case[0], vocabulary) for _ in range(_rounds(case, rounds))] for case in RESTARTS
        }
        for prompts in known.values():
            for prompt in prompts:
                _first_token(llm, prompt)
    taken: defaultdict[tuple[str, tuple[int, int]], list[tuple[float, int]]] = defaultdict(list)
    with fresh_llm(model, **options) as llm:
        _first_token(llm, random_tokens(rng, 64, vocabulary))
        for case, prompts in known.items():
            for prompt in prompts:
                for kind in ("loaded", "hot"):
                    taken[kind, case].append(_first_token(llm, prompt + random_tokens(rng, case[1], vocabulary)))
                taken["cold", case].append(_first_token(llm, random_tokens(rng, sum(case), vocabulary)))
    with fresh_llm(model, num_blocks=options["num_blocks"]) as llm:
        _first_token(llm, random_tokens(rng, 64, vocabulary))
        for case in RESTARTS:
            for _ in range(_rounds(case, rounds)):
                taken["no tiers", case].append(_first_token(llm, random_tokens(rng, sum(case), vocabulary)))
    median = {key: statistics.median(seconds for seconds, _ in each) for key, each in taken.items()}
    return [
        Restart(
            *case,
            loaded=median["loaded", case],
            hot=median["hot", case],
            cold=median["cold", case],
            cold_without_tiers=median["no tiers", case],
            cached_tokens=int(statistics.median(cached for _, cached in taken["loaded", case])),
        )
        for case in RESTARTS
    ]


def measure_shared(model: str | None, store: str, folder: Path, rounds: int) -> Shared:
    """First tokens over a shared store into which an earlier engine has written; what it wrote stays there.

    Args:
        model: as for `LLM`.
        store: as ``shared_cache`` of `LLM`.
        folder: for a new secret, by which nothing that was in the store before is found.
        rounds: prompts of either kind.
    """
    rng = random.Random(4)
    length = RESTARTS[0][0]
    secret = folder / "secret"
    secret.write_text(secrets.token_hex(32))
    num_blocks = (2 * rounds + 1) * (length // BLOCK_SIZE + 2)
    options: dict[str, Any] = {"shared_cache": store, "cache_secret_file": secret, "num_blocks": num_blocks}
    with fresh_llm(model, **options) as llm:
        vocabulary = llm.engine.loaded.vocab_size
        known = [random_tokens(rng, length, vocabulary) for _ in range(rounds)]
        for prompt in known:
            _first_token(llm, prompt)
    loaded: list[tuple[float, int]] = []
    cold: list[float] = []
    with fresh_llm(model, **options) as llm:
        _first_token(llm, random_tokens(rng, 64, vocabulary))
        for prompt in known:
            loaded.append(_first_token(llm, prompt))
            cold.append(_first_token(llm, random_tokens(rng, length, vocabulary))[0])
    seconds, cached = zip(*loaded, strict=True)
    return Shared(length, statistics.median(seconds), statistics.median(cold), int(statistics.median(cached)))


def _rounds(case: tuple[int, int], rounds: int) -> int:
    return MORE_ROUNDS * rounds if case[0] <= RESTARTS[0][0] else rounds


def _blocks(rounds: int) -> int:
    return sum(_rounds(case, rounds) * (-(-sum(case) // BLOCK_SIZE) + 1) for case in RESTARTS)


def _first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens were cached."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    return seconds_to_first_token(output), output.num_cached_tokens
