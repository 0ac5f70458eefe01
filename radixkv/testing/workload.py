"""Workloads as plain steps, and their replay on a checked cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixkv.testing.checked_cache import CheckedCache, LiveSequence


@dataclass(frozen=True, slots=True)
class Open:
    """Begin the sequence ``key``."""

    key: str
    prompt: tuple[int, ...]
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute up to ``count`` more tokens of the prompt, and reserve ``spare`` more positions that may never be used."""

    key: str
    count: int
    spare: int = 0


@dataclass(frozen=True, slots=True)
class Generate:
    """Append ``tokens``, as generated, once what is left of the prompt is computed."""

    key: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fork:
    """Fork the sequence ``child`` from ``key``."""

    key: str
    child: str


@dataclass(frozen=True, slots=True)
class Close:
    key: str


@dataclass(frozen=True, slots=True)
class Abort:
    key: str


@dataclass(frozen=True, slots=True)
class Clear:
    namespace: str = ""


Step = Open | Compute | Generate | Fork | Close | Abort | Clear
"""One step of a workload for `replay`."""


def replay(steps: Sequence[Step], cache: CheckedCache) -> int:
    """Carry out a workload, then close and clear everything; returns how many steps were refused because blocks were missing.

    A sequence whose prompt does not fit is aborted, as an engine would. Steps that name an ended
    sequence, or begin a live one, are skipped.

    Raises:
        RuleViolation: the cache broke a rule.
    """
    sequences: dict[str, LiveSequence] = {}
    num_refused = 0
    for step in steps:
        if isinstance(step, Clear):
            cache.clear(step.namespace)
            continue
        if isinstance(step, Open):
            if step.key in sequences:
                continue
            opened = cache.open(step.prompt, step.namespace)
            if opened is None:
                num_refused += 1
            else:
                sequences[step.key] = opened
            continue
        sequence = sequences.get(step.key)
        if sequence is None:
            continue
        if isinstance(step, Fork):
            if step.child in sequences:
                continue
            child = cache.fork(sequence)
            if child is None:
                num_refused += 1
            else:
                sequences[step.child] = child
        elif isinstance(step, Close):
            cache.close(sequences.pop(step.key))
        elif isinstance(step, Abort):
            cache.abort(sequences.pop(step.key))
        elif not _grow(cache, sequence, step):
            num_refused += 1
            cache.abort(sequences.pop(step.key))
    cache.finish()
    return num_refused


def _grow(cache: CheckedCache, sequence: LiveSequence, step: Compute | Generate) -> bool:
    if isinstance(step, Compute):
        return cache.compute(sequence, step.count, step.spare)
    if sequence.num_pending and not cache.compute(sequence, sequence.num_pending):
        return False
    return cache.generate(sequence, step.tokens)
