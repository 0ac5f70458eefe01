"""What a router's decision costs: which of 16 replicas gets a prompt, with a million blocks known."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console

from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.common.percentiles import p99
from radixkv.bench.common.tables import figure_table
from radixkv.bench.common.timing import frozen_garbage
from radixkv.routing import Router, prompt_hashes

NUM_REPLICAS, NUM_BLOCKS, BLOCK_SIZE = 16, 1_000_000, 16
_NUM_SYSTEM_PROMPTS, _SYSTEM_BLOCKS = 20, 64
# Length of a prompt of which no replica has cached anything.
_NEW_TOKENS = 32_000
# Between decisions, by the router's clock, so that what was sent a while ago expires at the same rate.
_SECONDS_BETWEEN = 0.01


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured, in microseconds of the thread's processor time."""

    name: str
    median_us: float
    p99_us: float


def fill(router: Router, num_blocks: int, rng: random.Random) -> list[list[int]]:
    """Let replicas hold conversations under a few system prompts, some of them on two; returns the hashes of each."""
    systems = [[rng.getrandbits(63) for _ in range(_SYSTEM_BLOCKS)] for _ in range(_NUM_SYSTEM_PROMPTS)]
    prompts: list[list[int]] = []
    while num_blocks > 0:
        own = [rng.getrandbits(63) for _ in range(rng.randint(20, 400))]
        num_blocks -= len(own)
        prompts.append(rng.choice(systems) + own)
        for name in rng.sample(router.replicas, rng.choice((1, 1, 1, 2))):
            router.stored(name, prompts[-1])
    return prompts


class _Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def measure(num_blocks: int, num_decisions: int) -> list[Row]:
    """Time decisions about partly cached and about new prompts, the notes that follow them, and hashing a prompt."""
    rng, clock = random.Random(0), _Clock()
    router = Router(BLOCK_SIZE, clock=clock)
    for number in range(NUM_REPLICAS):
        router.add(str(number))
    prompts = fill(router, num_blocks, rng)

    def known() -> list[int]:
        prompt = rng.choice(prompts)
        return [*prompt[: rng.randint(1, len(prompt))], *(rng.getrandbits(63) for _ in range(10))]

    def unknown() -> list[int]:
        return [rng.getrandbits(63) for _ in range(_NEW_TOKENS // BLOCK_SIZE)]

    def microseconds(call: Callable[[], object]) -> float:
        start = time.thread_time_ns()
        call()
        return (time.thread_time_ns() - start) / 1e3

    def decide(prompt: list[int]) -> tuple[float, float]:
        clock.seconds += _SECONDS_BETWEEN
        start = time.thread_time_ns()
        placement = router.choose(prompt, len(prompt) * BLOCK_SIZE)
        taken = (time.thread_time_ns() - start) / 1e3
        assert placement is not None
        noting = microseconds(lambda: router.prefilled(placement)) + microseconds(lambda: router.finish(placement))
        return taken, noting

    with frozen_garbage():
        decisions, notes = zip(*(decide(known()) for _ in range(num_decisions)), strict=True)
        new = [decide(unknown())[0] for _ in range(max(1, num_decisions // 10))]
        tokens = [rng.randrange(50_000) for _ in range(4096)]
        hashing = [microseconds(lambda: prompt_hashes(tokens, "", BLOCK_SIZE)) for _ in range(100)]
    return [
        _row("choose a replica", decisions),
        _row("note its first token and its end", notes),
        _row(f"choose one for {_NEW_TOKENS:,} tokens that are new", new),
        _row("hash a prompt of 4,096 tokens", hashing),
    ]


def _row(name: str, times: Sequence[float]) -> Row:
    return Row(name, median(times), p99(times))


def run_routing(console: Console, num_decisions: int, json_path: Path | None) -> None:
    """Measure, print a table, and write the rows."""
    with console.status("routing"):
        rows = measure(NUM_BLOCKS, num_decisions)
    content = {"machine": describe_machine(), "rows": [asdict(row) for row in rows]}
    write_figures(json_path, content)
    table = figure_table(f"{NUM_REPLICAS} replicas, {NUM_BLOCKS:,} blocks", "median, us", "p99, us")
    for row in rows:
        table.add_row(row.name, f"{row.median_us:,.0f}", f"{row.p99_us:,.0f}")
    console.print(table)
