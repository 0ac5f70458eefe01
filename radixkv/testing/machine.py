"""A Hypothesis state machine that drives any cache at random and checks the eleven rules after every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, multiple, rule

from radixkv.cache.arguments import check_count
from radixkv.testing.adapter import CacheAdapter
from radixkv.testing.arguments import check_maker, check_namespaces
from radixkv.testing.checked_cache import CheckedCache
from radixkv.testing.live_sequence import LiveSequence
from radixkv.testing.strategies import PoolShape, pool_shapes, prompts, token_lists

_SHAPES = pool_shapes()


def cache_machine(
    make_adapter: Callable[[int, int], CacheAdapter],
    *,
    shapes: st.SearchStrategy[PoolShape] = _SHAPES,
    namespaces: Sequence[str] = ("", "tenant"),
    max_examples: int = 200,
    steps: int = 40,
) -> type[RuleBasedStateMachine]:
    """A state machine over the caches that ``make_adapter(num_blocks, block_size)`` makes.

    Its ``TestCase`` is a test for pytest and unittest; `hypothesis.stateful.run_state_machine_as_test` runs it elsewhere.

    Args:
        shapes: the pools to try.
        namespaces: under which prompts are opened.
        max_examples: random runs.
        steps: at most, in each run.

    Raises:
        TypeError: ``make_adapter`` cannot be called, or is an abstract class; ``namespaces`` are not strings.
        ValueError: a number is not a whole number of at least 1, or there are no ``namespaces``.
    """
    check_maker("make_adapter", make_adapter, "(num_blocks, block_size)")
    check_namespaces(namespaces)
    check_count("max_examples", max_examples, 1)
    check_count("steps", steps, 1)

    class CacheMachine(RuleBasedStateMachine):
        live = Bundle("live")

        @initialize(shape=shapes)
        def start(self, shape: PoolShape) -> None:
            self.cache = CheckedCache(make_adapter(shape.num_blocks, shape.block_size))
            self.seen: list[list[int]] = []

        @rule(target=live, data=st.data(), namespace=st.sampled_from(list(namespaces)))
        def open(self, data: st.DataObject, namespace: str) -> Any:
            prompt = data.draw(prompts(self.seen), label="prompt")
            self.seen.append(prompt)
            sequence = self.cache.open(prompt, namespace)
            return multiple() if sequence is None else sequence

        @rule(sequence=live, count=st.integers(1, 40), more=token_lists(), spare=st.integers(0, 9))
        def grow(self, sequence: LiveSequence, count: int, more: list[int], spare: int) -> None:
            if not sequence.num_pending:
                sequence.tokens = sequence.tokens + more
            self.cache.compute(sequence, count, spare)

        @rule(target=live, sequence=live)
        def fork(self, sequence: LiveSequence) -> Any:
            child = self.cache.fork(sequence)
            return multiple() if child is None else child

        @rule(sequence=consumes(live))
        def close(self, sequence: LiveSequence) -> None:
            self.cache.close(sequence)

        @rule(sequence=consumes(live))
        def abort(self, sequence: LiveSequence) -> None:
            self.cache.abort(sequence)

        @rule(data=st.data(), namespace=st.sampled_from(list(namespaces)))
        def match(self, data: st.DataObject, namespace: str) -> None:
            if self.seen:
                self.cache.match(data.draw(st.sampled_from(self.seen), label="prompt"), namespace)

        @rule(num_tokens=st.integers(1, 96), namespace=st.sampled_from(list(namespaces)))
        def squeeze(self, num_tokens: int, namespace: str) -> None:
            """A prompt that shares nothing is computed and aborted, and evicts what is cached."""
            sequence = self.cache.open([9] * num_tokens, namespace)
            if sequence is not None:
                self.cache.compute(sequence, num_tokens)
                self.cache.abort(sequence)

        @rule(namespace=st.sampled_from(list(namespaces)))
        def clear(self, namespace: str) -> None:
            self.cache.clear(namespace)

        def teardown(self) -> None:
            if hasattr(self, "cache"):
                self.cache.finish()

    CacheMachine.TestCase.settings = settings(
        max_examples=max_examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return CacheMachine
