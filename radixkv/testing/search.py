"""The shortest run in which a cache breaks a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from hypothesis import find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from radixkv.testing.adapter import CacheAdapter
from radixkv.testing.checked_cache import CheckedCache
from radixkv.testing.rules import RuleViolation
from radixkv.testing.strategies import PoolShape, pool_shapes, step_lists
from radixkv.testing.workload import Clear, Step, replay


def find_violation(
    make_adapter: Callable[[int, int], CacheAdapter], *, max_examples: int = 2000
) -> RuleViolation | None:
    """Try random steps on caches of a few blocks until one breaks a rule, then shrink the run.

    Args:
        make_adapter: makes an empty cache of ``(num_blocks, block_size)``.
        max_examples: how many random runs to try. They are the same at every call.

    Returns:
        The violation after the fewest steps that was found; None if no rule was broken.
    """

    def violation(case: tuple[PoolShape, Sequence[Step]]) -> RuleViolation | None:
        shape, steps = case
        try:
            replay(steps, CheckedCache(make_adapter(shape.num_blocks, shape.block_size)))
        except RuleViolation as found:
            return found
        return None

    cases = st.tuples(pool_shapes(8, (1, 2, 4)), step_lists())
    options = settings(max_examples=max_examples, database=None, deadline=None)
    try:
        shortest = find(cases, lambda case: violation(case) is not None, settings=options, random=Random(0))
    except NoSuchExample:
        return None
    shape, steps = shortest
    return violation((shape, _shorten(steps, lambda fewer: violation((shape, fewer)) is not None)))


def _shorten(steps: Sequence[Step], is_broken: Callable[[Sequence[Step]], bool]) -> Sequence[Step]:
    """Leave out whole sequences, then single steps, that the violation does not need.

    Hypothesis has shrunk the steps one by one, but keeps a minimum number, and the steps that need each other.
    """
    for key in {step.key for step in steps if not isinstance(step, Clear)}:
        fewer = [
            step for step in steps if isinstance(step, Clear) or key not in (step.key, getattr(step, "child", None))
        ]
        if is_broken(fewer):
            steps = fewer
    for index in reversed(range(len(steps))):
        fewer = [*steps[:index], *steps[index + 1 :]]
        if is_broken(fewer):
            steps = fewer
    return steps
