"""Workloads as plain steps, and their replay on a checked cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixkv.testing.checked_cache import CheckedCache
from radixkv.testing.live_sequence import LiveSequence


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

    A sequence that does not fit is aborted, as an engine would. Steps that name an ended sequence, or begin a live one, are
    skipped.

    Raises:
        RuleViolation: the cache broke a rule.
    """
    sequences: dict[str, LiveSequence] = {}
    num_refused = 0

    def begin(key: str, sequence: LiveSequence | None) -> int:
        if sequence is None:
            return 1
        sequences[key] = sequence
        return 0

    for step in steps:
        match step:
            case Clear(namespace):
                cache.clear(namespace)
            case Open(key, prompt, namespace) if key not in sequences:
                num_refused += begin(key, cache.open(prompt, namespace))
            case Fork(key, child) if key in sequences and child not in sequences:
                num_refused += begin(child, cache.fork(sequences[key]))
            case Close(key) if key in sequences:
                cache.close(sequences.pop(key))
            case Abort(key) if key in sequences:
                cache.abort(sequences.pop(key))
            case Compute(key) | Generate(key) if key in sequences:
                if not _grow(cache, sequences[key], step):
                    num_refused += 1
                    cache.abort(sequences.pop(key))
    cache.finish()
    return num_refused


def _grow(cache: CheckedCache, sequence: LiveSequence, step: Compute | Generate) -> bool:
    if isinstance(step, Compute):
        return cache.compute(sequence, step.count, step.spare)
    if sequence.num_pending and not cache.compute(sequence, sequence.num_pending):
        return False
    return cache.generate(sequence, step.tokens)
