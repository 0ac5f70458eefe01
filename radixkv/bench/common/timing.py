"""How short calls are timed: processor time of this thread, garbage collection frozen, medians of several rounds."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per call."""

    median_us: float
    min_us: float


def measure(prepare: Callable[[], State], work: Callable[[State], object], *, rounds: int, calls: int = 1) -> Timing:
    """Time ``work`` on the result of an untimed ``prepare`` in every round; the first round warms up and is dropped.

    Args:
        calls: how many calls one run of ``work`` stands for.
    """
    seconds = []
    for _ in range(rounds + 1):
        state = prepare()
        start = time.thread_time_ns()
        work(state)
        seconds.append((time.thread_time_ns() - start) / 1e3 / calls)
    return Timing(statistics.median(seconds[1:]), min(seconds[1:]))


def measure_call(call: Callable[[], object], *, rounds: int, calls: int = 1) -> Timing:
    """Time a call that needs no preparation, ``calls`` times in every round."""

    def repeat(_: None) -> None:
        for _call in range(calls):
            call()

    return measure(lambda: None, repeat, rounds=rounds, calls=calls)


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """Without garbage collection, which would charge one call for the garbage of others."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
