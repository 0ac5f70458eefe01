"""What tiers below the pool gain and cost, on a real model: against no tier, and hot against cold, in the same run.

Five questions:

- how fast the first token is after a restart;
- how fast a working set four times the pool is served, which is recomputed again and again where there is no tier, and how
  far that is from a pool that holds all of it, which no tier can beat;
- how late first tokens are for users who arrive at random times;
- what writing costs prompts that are never repeated;
- how fast the first token is of a prompt that another engine has put into a shared store.
"""

from __future__ import annotations

import os
import random
import secrets
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.common.tables import figure_table
from radixkv.bench.tiers.fresh_engine import BLOCK_SIZE, fresh_llm, random_tokens, seconds_to_first_token
from radixkv.bench.tiers.working_set import LOAD, Arrivals, WorkingSet, measure_arrivals, measure_working_set
from radixkv.llm import LLM
from radixkv.sampling_params import SamplingParams

# Tokens of a prompt that is known, and of a new question behind it; without one, the prompt is repeated word for word.
RESTARTS = ((1000, 0), (1000, 20), (7000, 20))
# What takes little time, or differs by little, is repeated this many times as often as the rest.
MORE_ROUNDS = 4
UNRELATED_PROMPTS = 16
UNRELATED_TOKENS = 240
UNRELATED_ANSWER = 64


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


def run_tiers(
    console: Console,
    model: str | None,
    conversations: int,
    turns: int,
    rounds: int,
    shared_cache: str | None,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Measure, print tables, and write the figures.

    Args:
        console: for the tables.
        model: as for `LLM`.
        conversations: in the working set.
        turns: of each.
        rounds: of what is repeated.
        shared_cache: a store to be measured, as for `LLM`; None: none is.
        json_path: for the figures.
        plot_path: for a drawing.
    """
    shared = None
    if shared_cache is not None:  # first: a store that cannot be opened is then refused before the others take minutes
        with console.status("a shared store"), _new_folder() as folder:
            shared = measure_shared(model, shared_cache, Path(folder), MORE_ROUNDS * rounds)
        os.sync()  # otherwise the system would write what was left in the store during the next measurement
    with console.status("after a restart"), _new_folder() as folder:
        restarts = measure_restart(model, Path(folder), rounds)
    sets = []
    for tier in ("none", "host", "disk", "larger pool"):
        with console.status("a working set four times the pool"), _new_folder() as folder:
            sets.append(measure_working_set(model, tier, Path(folder), conversations, turns))
    with console.status("users who come when they want"), _new_folder() as folder:
        rate = LOAD * sets[0].requests_per_second
        arrivals = measure_arrivals(model, rate, Path(folder), conversations, turns)
    with console.status("what writing costs"), _new_folder() as folder:
        writing = measure_writing(model, Path(folder), rounds)
    figures = {
        "machine": describe_machine("torch", "transformers"),
        "restart": [asdict(each) for each in restarts],
        "working_set": {"conversations": conversations, "turns": turns, "rows": [asdict(each) for each in sets]},
        "arrivals": [asdict(each) for each in arrivals],
        "writing": asdict(writing),
        **({} if shared is None else {"shared": asdict(shared)}),
    }
    write_figures(json_path, figures)
    if plot_path is not None:
        plot_tiers(restarts, sets, plot_path)
    _print(console, restarts, sets, arrivals, writing, shared)


def _new_folder() -> tempfile.TemporaryDirectory[str]:
    """One for each measurement: the page cache that the files of one take would have to be reclaimed during the next."""
    return tempfile.TemporaryDirectory(prefix="radixkv-tiers-")


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
        for number in range(MORE_ROUNDS * rounds + 1):
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
    num_blocks = 2 * rounds * (length // BLOCK_SIZE + 2) + UNRELATED_PROMPTS
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


def plot_tiers(restarts: list[Restart], sets: list[WorkingSet], path: Path) -> None:
    """Draw the first tokens after a restart, and the working set's throughput."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = ["hot", "loaded", "cold"]
    for index, restart in enumerate(restarts):
        heights = [restart.hot, restart.loaded, restart.cold]
        label = f"{restart.prompt_tokens} tokens, {restart.question_tokens} new"
        bars = left.bar(np.arange(3) + 0.27 * index, heights, 0.24, label=label)
        left.bar_label(bars, fmt="%.2f")
    left.set_xticks(np.arange(3) + 0.27, names)
    left.set_yscale("log")
    left.set_ylabel("seconds to the first token")
    left.set_title("After a restart, from the disk")
    left.legend()
    bars = right.bar([each.tier for each in sets], [each.tokens_per_second for each in sets])
    right.bar_label(bars, fmt="%.0f")
    right.set_ylabel("tokens a second")
    right.set_title("Working set four times the pool, by what is below it")
    figure.savefig(path)


def _rounds(case: tuple[int, int], rounds: int) -> int:
    return MORE_ROUNDS * rounds if case[0] <= RESTARTS[0][0] else rounds


def _blocks(rounds: int) -> int:
    return sum(_rounds(case, rounds) * (-(-sum(case) // BLOCK_SIZE) + 1) for case in RESTARTS)


def _first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens were cached."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    return seconds_to_first_token(output), output.num_cached_tokens


def _print(
    console: Console,
    restarts: list[Restart],
    sets: list[WorkingSet],
    arrivals: list[Arrivals],
    writing: Writing,
    shared: Shared | None,
) -> None:
    columns = ("prompt", "hot, s", "loaded after a restart, s", "cold, s", "cold without tiers, s")
    table = figure_table(*columns, "loaded / hot", "loaded / cold")
    for each in restarts:
        table.add_row(
            f"{each.prompt_tokens}, {each.cached_tokens} of it loaded, and {each.question_tokens} new",
            f"{each.hot:.3f}",
            f"{each.loaded:.3f}",
            f"{each.cold:.3f}",
            f"{each.cold_without_tiers:.3f}",
            f"{each.loaded / each.hot:.2f}",
            f"{each.loaded / each.cold:.3f}",
        )
    console.print(table)
    table = figure_table("below the pool", "tokens/s", "against none", "cached", "first token p50, s", "p99, s")
    for row in sets:
        table.add_row(
            row.tier,
            f"{row.tokens_per_second:.0f}",
            f"{row.tokens_per_second / sets[0].tokens_per_second:.2f}",
            f"{row.cached_share:.0%}",
            f"{row.ttft_p50:.2f}",
            f"{row.ttft_p99:.2f}",
        )
    console.print(table)
    table = figure_table("below the pool", "requests/s", "cached", "first token p50, s", "p99, s", "p99 / p50 of none")
    for users in arrivals:
        table.add_row(
            users.tier,
            f"{users.requests_per_second:.2f}",
            f"{users.cached_share:.0%}",
            f"{users.ttft_p50:.2f}",
            f"{users.ttft_p99:.2f}",
            f"{users.ttft_p99 / arrivals[0].ttft_p50:.2f}",
        )
    console.print(table)
    console.print(
        f"{UNRELATED_PROMPTS} unrelated prompts: {writing.without_tiers:.1f} tokens/s without tiers, "
        f"{writing.write_back_ratio - 1:+.1%} with write-back, {writing.write_through_ratio - 1:+.1%} with write-through"
    )
    if shared is not None:
        console.print(
            f"{shared.prompt_tokens} tokens, {shared.cached_tokens} of them from the shared store: {shared.loaded:.3f} s, "
            f"{shared.loaded / shared.cold:.3f} of {shared.cold:.3f} s cold"
        )
