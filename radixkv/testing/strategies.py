"""Hypothesis strategies: prompts that share prefixes, shapes of pools, and workloads that resemble traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from radixkv.testing.workload import Abort, Close, Compute, Fork, Generate, Open, Step


@dataclass(frozen=True, slots=True)
class PoolShape:
    """How many blocks there are, and of how many tokens each."""

    num_blocks: int
    block_size: int


def pool_shapes(
    max_blocks: int = 24, block_sizes: Sequence[int] = (1, 2, 3, 4, 5, 8, 16, 32)
) -> SearchStrategy[PoolShape]:
    """Small pools, so that every call fails sometimes."""
    return st.builds(PoolShape, st.integers(1, max_blocks), st.sampled_from(list(block_sizes)))


def token_lists(max_size: int = 24, num_tokens: int = 3, min_size: int = 1) -> SearchStrategy[list[int]]:
    """Tokens from a tiny alphabet, so that unrelated lists have prefixes in common too, which end anywhere."""
    return st.lists(st.integers(0, num_tokens - 1), min_size=min_size, max_size=max_size)


@st.composite
def prompts(draw: DrawFn, earlier: Sequence[Sequence[int]] = (), max_tail: int = 24) -> list[int]:
    """A prompt that shares a prefix of any length with one of ``earlier``."""
    stem: Sequence[int] = draw(st.sampled_from(list(earlier))) if earlier else []
    return [*stem[: draw(st.integers(0, len(stem)))], *draw(token_lists(max_tail))]


@st.composite
def prompt_families(draw: DrawFn, max_prompts: int = 8, max_tail: int = 24) -> list[list[int]]:
    """Several prompts, each of which may share a prefix with an earlier one."""
    family: list[list[int]] = []
    for _ in range(draw(st.integers(1, max_prompts))):
        family.append(draw(prompts(family, max_tail)))
    return family


@st.composite
def chats(draw: DrawFn, name: str, system: Sequence[int] = (), max_turns: int = 3) -> list[Step]:
    """A conversation: every turn's prompt is everything before it, the answers included, and something new."""
    steps: list[Step] = []
    history = list(system)
    for turn in range(draw(st.integers(1, max_turns))):
        key = f"{name}, turn {turn + 1}"
        history = history + draw(token_lists(8))
        answer = draw(token_lists(8))
        steps += [Open(key, tuple(history)), *_prefill(key, len(history), draw(st.integers(1, 16)))]
        steps += [Generate(key, (token,)) for token in answer]
        steps.append(Close(key))
        history = history + answer
    return steps


@st.composite
def parallel_samples(draw: DrawFn, name: str, system: Sequence[int] = (), max_samples: int = 4) -> list[Step]:
    """One prompt, several answers, generated token by token side by side."""
    prompt = (*system, *draw(token_lists(8)))
    keys = [f"{name}, sample {number + 1}" for number in range(draw(st.integers(2, max_samples)))]
    answers = [draw(token_lists(6)) for _ in keys]
    steps: list[Step] = [Open(keys[0], prompt), *_prefill(keys[0], len(prompt), draw(st.integers(1, 16)))]
    steps += [Fork(keys[0], key) for key in keys[1:]]
    for index in range(max(map(len, answers))):
        steps += [Generate(k, (a[index],)) for k, a in zip(keys, answers, strict=True) if index < len(a)]
    return steps + [Close(key) for key in keys]


@st.composite
def beams(draw: DrawFn, name: str, system: Sequence[int] = (), width: int = 3, max_steps: int = 6) -> list[Step]:
    """A beam search: at some steps one of several beams is dropped and replaced by a fork of another."""
    prompt = (*system, *draw(token_lists(8)))
    running = [f"{name}, beam {number + 1}" for number in range(width)]
    steps: list[Step] = [Open(running[0], prompt), *_prefill(running[0], len(prompt), draw(st.integers(1, 16)))]
    steps += [Fork(running[0], key) for key in running[1:]]
    next_number = width + 1
    for _ in range(draw(st.integers(1, max_steps))):
        steps += [Generate(key, (draw(st.integers(0, 2)),)) for key in running]
        if width > 1 and draw(st.booleans()):
            steps.append(Abort(running.pop(draw(st.integers(0, width - 1)))))
            heir = f"{name}, beam {next_number}"
            steps.append(Fork(draw(st.sampled_from(running)), heir))
            running.append(heir)
            next_number += 1
    return [*steps, Close(running[0]), *(Abort(key) for key in running[1:])]


@st.composite
def aborted(draw: DrawFn, name: str, system: Sequence[int] = ()) -> list[Step]:
    """A prompt that is aborted when a part of it is computed."""
    prompt = (*system, *draw(token_lists(16)))
    return [Open(name, prompt), Compute(name, draw(st.integers(0, len(prompt)))), Abort(name)]


@st.composite
def pressure(draw: DrawFn, name: str, max_tokens: int = 96) -> list[Step]:
    """A long prompt that shares nothing, and evicts what is cached."""
    length = draw(st.integers(1, max_tokens))
    return [Open(name, (9,) * length), Compute(name, length), Close(name)]


@st.composite
def workloads(draw: DrawFn, max_scenarios: int = 5) -> list[Step]:
    """Chats, samples, beams, aborts and pressure, under one system prompt, interleaved: to `replay`."""
    system = draw(token_lists(20, min_size=0))
    scenarios: list[list[Step]] = []
    for number in range(draw(st.integers(1, max_scenarios))):
        name = f"sequence {number + 1}"
        kinds: list[SearchStrategy[list[Step]]] = [
            chats(name, system),
            parallel_samples(name, system),
            beams(name, system),
            aborted(name, system),
            pressure(name),
        ]
        scenarios.append(draw(st.sampled_from(kinds).flatmap(lambda kind: kind)))
    mixed: list[Step] = []
    while scenarios:
        scenario = draw(st.sampled_from(scenarios))
        mixed.append(scenario.pop(0))
        scenarios = [s for s in scenarios if s]
    return mixed


def _prefill(key: str, length: int, chunk: int) -> list[Step]:
    return [Compute(key, chunk) for _ in range(-(-length // chunk))]
