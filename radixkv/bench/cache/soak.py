"""`radixkv bench soak`: random work on the cache for a given time, every rule checked throughout.

Runs without Hypothesis, so that millions of steps fit into minutes: caches of random shapes are driven one after another,
each by tens of thousands of steps, with a shadow memory (`radixkv.testing.CheckedCache`). Every step checks the rules that
it can break; every few steps all rules are verified from scratch.
"""

from __future__ import annotations

import random
import resource
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.machine import describe_machine
from radixkv.testing.adapter import PrefixCacheAdapter
from radixkv.testing.checked_cache import CheckedCache
from radixkv.testing.live_sequence import LiveSequence
from radixkv.testing.rules import RuleViolation

_STEPS_PER_CACHE = 20_000
_STEPS_PER_VERIFY = 50
_NAMESPACES = ("", "tenant")


@dataclass
class SoakResult:
    """What a run did and found.

    Attributes:
        peak_bytes: the process's peak memory so far, recorded early in each tenth of the run; flat if nothing leaks.
    """

    steps: int = 0
    caches: int = 0
    verifications: int = 0
    refused: int = 0
    evicted_blocks: int = 0
    copied_blocks: int = 0
    deduplicated_blocks: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)


class RandomEngine:
    """Drives one cache at random: prompts that share prefixes, chunks, samples, aborts, pressure."""

    def __init__(self, rng: random.Random, result: SoakResult) -> None:
        self._rng = rng
        self._result = result
        block_size = rng.choice([1, 2, 3, 4, 8, 16, 32])
        self._adapter = PrefixCacheAdapter(rng.randint(4, 120), block_size)
        self._cache = CheckedCache(self._adapter, always=False, keep_story=False)
        self._seen: list[list[int]] = [[0]]
        self._longest = max(2, self._adapter.num_blocks * block_size // 4)

    def run(self, num_steps: int) -> None:
        """Take random steps; raises `RuleViolation` where the cache breaks a rule."""
        for number in range(num_steps):
            self._step()
            if number % _STEPS_PER_VERIFY == 0:
                self._cache.verify()
                self._result.verifications += 1
        self._cache.finish()
        stats = self._adapter.cache.stats
        self._result.evicted_blocks += stats.evicted_blocks
        self._result.copied_blocks += stats.copied_blocks
        self._result.deduplicated_blocks += stats.deduplicated_blocks

    def _step(self) -> None:
        rng, live = self._rng, list(self._cache.live.values())
        kinds = {"open": 4, "grow": 12, "fork": 2, "close": 3, "abort": 1, "match": 1, "clear": 0.02}
        if len(live) > 24:
            kinds |= {"open": 0, "fork": 0, "close": 8}
        kind = rng.choices(list(kinds), list(kinds.values()))[0] if live else "open"
        self._result.kinds[kind] += 1
        self._result.steps += 1
        if kind == "open":
            self._result.refused += self._cache.open(self._prompt(), rng.choice(_NAMESPACES)) is None
        elif kind == "grow":
            self._result.refused += not self._grow(rng.choice(live))
        elif kind == "fork":
            self._cache.fork(rng.choice(live))
        elif kind == "close":
            self._cache.close(rng.choice(live))
        elif kind == "abort":
            self._cache.abort(rng.choice(live))
        elif kind == "match":
            self._cache.match(rng.choice(self._seen), rng.choice(_NAMESPACES))
        else:
            self._cache.clear(rng.choice(_NAMESPACES))

    def _prompt(self) -> list[int]:
        stem = self._rng.choice(self._seen)
        tail = [self._rng.randint(0, 3) for _ in range(self._rng.randint(1, max(1, self._longest // 4)))]
        prompt = (stem[: self._rng.randint(0, len(stem))] + tail)[: self._longest]
        self._seen.append(prompt)
        if len(self._seen) > 60:
            self._seen.pop(self._rng.randrange(len(self._seen)))
        return prompt

    def _grow(self, sequence: LiveSequence) -> bool:
        if sequence.num_pending:
            return self._cache.compute(sequence, self._rng.randint(1, 40), self._rng.choice([0, 0, 1, 9]))
        return self._cache.generate(sequence, [self._rng.randint(0, 3) for _ in range(self._rng.randint(1, 3))])


def run_soak(console: Console, minutes: float, seed: int, json_path: Path | None) -> bool:
    """Soak for ``minutes``; returns whether no rule was broken."""
    result = SoakResult()
    number = 0
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("soaking", total=minutes * 60)
        begin = time.monotonic()
        while (elapsed := time.monotonic() - begin) < minutes * 60:
            progress.update(task, completed=elapsed, description=f"{result.steps:,} steps")
            rng = random.Random(f"{seed}/{number}")
            try:
                RandomEngine(rng, result).run(_STEPS_PER_CACHE)
            except (AssertionError, ValueError, LookupError) as error:
                result.failures.append(f"seed {seed}, cache {number}: {error}")
                if not isinstance(error, RuleViolation):
                    console.print_exception()
            number += 1
            if elapsed >= len(result.peak_bytes) * minutes * 6:
                result.peak_bytes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    result.caches = number
    _report(console, result, time.monotonic() - begin)
    document = {"machine": describe_machine("numpy"), "seed": seed, "minutes": minutes, **vars(result)}
    write_figures(json_path, document)
    return not result.failures


def _report(console: Console, result: SoakResult, seconds: float) -> None:
    console.print(
        f"{result.steps:,} steps on {result.caches} caches in {seconds:,.0f} s, "
        f"all rules verified {result.verifications:,} times"
    )
    console.print("steps: " + ", ".join(f"{count:,} {kind}" for kind, count in result.kinds.most_common()))
    console.print(
        f"{result.refused:,} refused, {result.evicted_blocks:,} blocks evicted, {result.copied_blocks:,} copied, "
        f"{result.deduplicated_blocks:,} deduplicated"
    )
    peaks = " ".join(f"{peak / 2**20:,.0f}" for peak in result.peak_bytes)
    console.print(f"peak memory after each tenth of the run, MiB: {peaks}")
    for failure in result.failures[:5]:
        console.print(failure, style="red")
    console.print(f"{len(result.failures)} failures", style="red" if result.failures else "green")
