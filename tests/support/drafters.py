"""Drafters for tests: one that knows the answers, and one that guesses badly."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from radixkv import LLM
from radixkv.drafting import Draft, DraftContext, Drafter
from radixkv.engine.speculation import Speculator


class Oracle(Drafter):
    """Knows whole sequences; some tokens of each draft are wrong on purpose.

    Args:
        seed: of the errors.
        error_rate: how likely a token is replaced.
        vocab_size: replacements are below this.
    """

    source = "oracle"

    def __init__(self, seed: int = 0, error_rate: float = 0.0, vocab_size: int = 100) -> None:
        self._random = random.Random(seed)
        self._error_rate = error_rate
        self._vocab_size = vocab_size
        self.sequences: list[Sequence[int]] = []

    def learn(self, requests: Sequence[tuple[list[int], Any]], answers: Sequence[Sequence[Any]]) -> None:
        """Know these answers from now on, and no others.

        Args:
            requests: each begins with its prompt.
            answers: samples to each request, which begin with their tokens.
        """
        self.sequences = [
            [*prompt, *tokens] for (prompt, _), samples in zip(requests, answers, strict=True) for tokens, *_ in samples
        ]

    def draft(self, context: DraftContext, max_tokens: int) -> Draft:
        known = len(context.token_ids)
        fitting = [each for each in self.sequences if list(each[:known]) == context.token_ids]
        if not fitting:
            return Draft(())
        token_ids = self._random.choice(fitting)[known : known + max_tokens]
        wrong = [self._random.randrange(self._vocab_size) for _ in token_ids]
        return Draft(
            [b if self._random.random() < self._error_rate else a for a, b in zip(token_ids, wrong, strict=True)]
        )


class Guesser(Drafter):
    """Guesses what nobody asked for: random tokens, too many, ids outside the vocabulary, no ids at all; or it raises.

    Args:
        seed: of what it does.
        vocab_size: of the model.
        bad: whether it also does what is refused.
    """

    source = "guesser"

    def __init__(self, seed: int, vocab_size: int, bad: bool = True) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size
        self._bad = bad

    def draft(self, context: DraftContext, max_tokens: int) -> Draft:
        guess: list[Any] = [
            self._random.randrange(self._vocab_size) for _ in range(self._random.randint(0, max_tokens))
        ]
        if not self._bad:
            return Draft(guess)
        kind = self._random.randrange(6)
        if kind == 0:
            raise RuntimeError("a drafter that fails")
        if kind == 1:
            return Draft([3] * (max_tokens + 1))
        if kind == 2:
            return Draft([*guess[1:], self._random.choice([-1, self._vocab_size, "3", None, 3.0])])
        return Draft(guess) if kind < 5 else None  # type: ignore[return-value]


def speculator(llm: LLM, drafters: Sequence[Drafter]) -> Speculator:
    """Drafts for an engine made without them, by a clock that gives every step the same time."""
    return Speculator(
        drafters,
        llm.engine.scheduler.blocks,
        max_tokens=8,
        max_rows=256,
        max_batched_tokens=llm.engine.capacity.max_num_batched_tokens,
        vocab_size=llm.engine.loaded.vocab_size,
        clock=_ticking(),
    )


def speculator_of(llm: LLM) -> Speculator:
    assert llm.engine._speculator is not None
    return llm.engine._speculator


def draft_from(llm: LLM, *drafters: Drafter) -> None:
    """From now on, ask these drafters alone."""
    speculator_of(llm)._drafters = drafters


def use_ticks(llm: LLM) -> None:
    """Make every step take the same time by the clock that teaches what rows are worth, so that drafts are verified."""
    speculator_of(llm)._clock = _ticking()


def _ticking() -> Callable[[], float]:
    """A clock by which a second passes from call to call."""
    ticks = itertools.count()
    return lambda: float(next(ticks))
