"""The shortest run in which a cache breaks a rule.

It tries random steps until one breaks a rule, then leaves out the steps that the violation does not need, and makes the rest
smaller. It does so without Hypothesis, which takes many times as long to make and shrink a run as to replay it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from radixkv.cache.arguments import check_count
from radixkv.testing.adapter import CacheAdapter
from radixkv.testing.arguments import check_maker, check_namespaces
from radixkv.testing.checked_cache import CheckedCache
from radixkv.testing.rules import RuleViolation
from radixkv.testing.workload import Abort, Clear, Close, Compute, Fork, Generate, Open, Step, replay

_KEYS = ("sequence 1", "sequence 2", "sequence 3")
_BLOCK_SIZES = (1, 2, 4)
_MOST_BLOCKS = 8
_MOST_STEPS = 30
_MOST_TOKENS = 12  # of a prompt
_NUM_OTHERS = 10  # runs to try after the first that breaks a rule: another one may shrink further


@dataclass(frozen=True, slots=True)
class _Run:
    """Steps, and the pool of the cache that takes them.

    Attributes:
        namespace: the one that is the simplest to read about.
    """

    num_blocks: int
    block_size: int
    steps: tuple[Step, ...]
    namespace: str


_BrokenRun = tuple[_Run, RuleViolation]


def find_violation(
    make_adapter: Callable[[int, int], CacheAdapter],
    *,
    namespaces: Sequence[str] = ("", "tenant"),
    max_examples: int = 2000,
) -> RuleViolation | None:
    """Try random steps on caches of a few blocks until one breaks a rule, then shrink the run.

    Args:
        make_adapter: makes an empty cache of ``(num_blocks, block_size)``.
        namespaces: under which prompts are opened; a shrunk run keeps to the first where it can.
        max_examples: how many random runs to try. They are the same at every call.

    Returns:
        The violation after the fewest steps that was found; None if no rule was broken.

    Raises:
        TypeError: ``make_adapter`` makes no adapter, ``namespaces`` are not strings, or a method of the adapter returns a
            wrong type.
        ValueError: ``max_examples`` is not a whole number of at least 1, there are no ``namespaces``, or an answer of the
            adapter is out of range.
    """
    check_maker("make_adapter", make_adapter, "(num_blocks, block_size)")
    check_namespaces(namespaces)
    check_count("max_examples", max_examples, 1)

    def violation(run: _Run) -> RuleViolation | None:
        try:
            replay(run.steps, CheckedCache(make_adapter(run.num_blocks, run.block_size)))
        except RuleViolation as found:
            return found
        return None

    def broken(runs: Iterable[_Run]) -> Iterator[_BrokenRun]:
        return ((run, found) for run in runs if (found := violation(run)) is not None)

    random = Random(0)
    runs = (_random_run(random, namespaces) for _ in range(max_examples))
    first = next(broken(runs), None)
    if first is None:
        return None
    others = broken(itertools.islice(runs, _NUM_OTHERS))
    return min((_shrunk(each, broken) for each in (first, *others)), key=lambda found: len(found.story))


def _random_run(random: Random, namespaces: Sequence[str]) -> _Run:
    """Steps of a few sequences in a pool so small that every call fails sometimes."""
    prompts: list[tuple[int, ...]] = [()]
    live: list[str] = []
    steps: list[Step] = []

    def some_tokens(most: int) -> tuple[int, ...]:
        # Two different ones, so that prompts drawn apart have prefixes in common too.
        return tuple(random.choices((0, 1), k=random.randint(1, most)))

    def begin(key: str) -> None:
        if live and random.random() < 0.4:
            steps.append(Fork(random.choice(live), key))
        else:
            stem = random.choice(prompts)
            prompt = (*stem[: random.randint(0, len(stem))], *some_tokens(_MOST_TOKENS))[:_MOST_TOKENS]
            prompts.append(prompt)
            steps.append(Open(key, prompt, random.choice(namespaces)))
        live.append(key)

    def go_on(key: str) -> None:
        kind = random.choices(("all", "part", "generate", "close", "abort"), (4, 4, 4, 3, 2))[0]
        if kind == "all":
            steps.append(Compute(key, _MOST_TOKENS))
        elif kind == "part":
            steps.append(Compute(key, random.randint(1, _MOST_TOKENS), random.randint(0, 4)))
        elif kind == "generate":
            steps.append(Generate(key, some_tokens(6)))
        else:
            steps.append(Close(key) if kind == "close" else Abort(key))
            live.remove(key)

    for _ in range(random.randint(_MOST_STEPS // 3, _MOST_STEPS)):
        key = random.choice(_KEYS)
        if random.random() < 0.05:
            steps.append(Clear(random.choice(namespaces)))
        elif key in live:
            go_on(key)
        else:
            begin(key)
    return _Run(random.randint(1, _MOST_BLOCKS), random.choice(_BLOCK_SIZES), tuple(steps), namespaces[0])


def _shrunk(shortest: _BrokenRun, broken: Callable[[Iterable[_Run]], Iterator[_BrokenRun]]) -> RuleViolation:
    """Take the first simpler run that still breaks a rule, and whose story is no longer, until there is none.

    A story is longer where the end of a run closes and clears what a step that was left out did. No run is repeated to see
    its violation again: a cache that is not deterministic may not break the rule twice.
    """
    run, violation = shortest
    while True:
        simpler = broken(_simpler_runs(run))
        better = next((each for each in simpler if len(each[1].story) <= len(violation.story)), None)
        if better is None:
            return violation
        run, violation = better


def _simpler_runs(run: _Run) -> Iterator[_Run]:
    """Runs with something left out or a number made smaller, those that save most first."""
    steps = run.steps
    for kept in _shorter(steps):
        yield replace(run, steps=kept)
    for key in _KEYS:
        yield from _if_changed(run, [s for s in steps if key not in (getattr(s, "key", ""), getattr(s, "child", ""))])
    for index, step in enumerate(steps):
        if isinstance(step, Fork):
            yield from _without_fork(run, index, step)
        elif isinstance(step, Generate):
            yield from _without_generation(run, index, step)
    for num_blocks in {run.num_blocks // 2, run.num_blocks - 1} - {0, run.num_blocks}:
        yield replace(run, num_blocks=num_blocks)
    for block_size in _BLOCK_SIZES[: _BLOCK_SIZES.index(run.block_size)]:
        yield replace(run, block_size=block_size)
    yield from _if_changed(run, [_under(run.namespace, step) for step in steps])
    for position in range(_MOST_TOKENS):
        # In all prompts at once, so that those that begin alike still do.
        yield from _if_changed(run, [_without_token(step, position) for step in steps])
    for index, step in enumerate(steps):
        for simpler in _simpler_steps(step, run.namespace):
            yield replace(run, steps=(*steps[:index], simpler, *steps[index + 1 :]))
    for first, second in itertools.combinations(range(len(steps)), 2):
        # Two steps that only make sense together, such as the beginning and the end of a sequence.
        yield replace(run, steps=(*steps[:first], *steps[first + 1 : second], *steps[second + 1 :]))


def _if_changed(run: _Run, steps: list[Step]) -> Iterator[_Run]:
    if tuple(steps) != run.steps:
        yield replace(run, steps=tuple(steps))


def _shorter(steps: tuple[Step, ...]) -> Iterator[tuple[Step, ...]]:
    """Without a half, a quarter, ... of the steps, and at last without one of them; from the end on."""
    size = len(steps) // 2
    while size:
        for stop in range(len(steps), 0, -size):
            yield (*steps[: max(0, stop - size)], *steps[stop:])
        size //= 2


def _without_fork(run: _Run, index: int, fork: Fork) -> Iterator[_Run]:
    """The parent does what its child did, or the child is opened as the parent was."""
    before, after = run.steps[:index], run.steps[index + 1 :]
    yield replace(run, steps=(*before, *(_renamed(step, fork.child, fork.key) for step in after)))
    opened = _last_opened(before, fork.key)
    if opened is not None:
        child = replace(opened, key=fork.child)
        yield replace(run, steps=(*before, child, *after))
        # What was generated after the fork may be what the child's prompt has.
        only_computed = (
            Compute(step.key, len(step.tokens)) if isinstance(step, Generate) and step.key == fork.child else step
            for step in after
        )
        yield replace(run, steps=(*before, child, *only_computed))


def _without_generation(run: _Run, index: int, step: Generate) -> Iterator[_Run]:
    """What is left of the prompt is computed alone, or together with the tokens, as a part of it."""
    before, after = run.steps[:index], run.steps[index + 1 :]
    opened = _last_opened(before, step.key)
    if opened is not None:
        prompt = Compute(step.key, len(opened.prompt))
        yield replace(run, steps=(*before, prompt, *after))
        yield replace(run, steps=(*before, prompt, Abort(step.key), *after))
        longer = replace(opened, prompt=opened.prompt + step.tokens)
        before = tuple(longer if each is opened else each for each in before)
        yield replace(run, steps=(*before, Compute(step.key, len(longer.prompt)), *after))


def _last_opened(steps: Sequence[Step], key: str) -> Open | None:
    """The last of these steps that begins this sequence with a prompt."""
    return next((step for step in reversed(steps) if isinstance(step, Open) and step.key == key), None)


def _renamed(step: Step, old: str, new: str) -> Step:
    if isinstance(step, Fork):
        return Fork(new if step.key == old else step.key, new if step.child == old else step.child)
    return step if isinstance(step, Clear) or step.key != old else replace(step, key=new)


def _under(namespace: str, step: Step) -> Step:
    return replace(step, namespace=namespace) if isinstance(step, Open | Clear) else step


def _without_token(step: Step, position: int) -> Step:
    if isinstance(step, Open) and position < len(step.prompt) > 1:
        return replace(step, prompt=(*step.prompt[:position], *step.prompt[position + 1 :]))
    return step


def _simpler_steps(step: Step, namespace: str) -> Iterator[Step]:
    if isinstance(step, Open):
        if step.namespace != namespace:
            yield replace(step, namespace=namespace)
        yield from (replace(step, prompt=tokens) for tokens in _simpler_tokens(step.prompt))
    elif isinstance(step, Generate):
        yield Abort(step.key)
        yield Compute(step.key, len(step.tokens))
        yield from (replace(step, tokens=tokens) for tokens in _simpler_tokens(step.tokens))
    elif isinstance(step, Compute):
        yield Abort(step.key)
        yield from (replace(step, spare=spare) for spare in range(step.spare))
        yield from (replace(step, count=count) for count in range(1, step.count))


def _simpler_tokens(tokens: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Fewer of them, and zeros."""
    for length in sorted({1, len(tokens) // 2, len(tokens) - 1} - {0, len(tokens)}):
        yield tokens[:length]
    for index, token in enumerate(tokens):
        if token:
            yield (*tokens[:index], 0, *tokens[index + 1 :])
