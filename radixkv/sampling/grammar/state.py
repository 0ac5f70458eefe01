"""A sequence's state in its grammar, by which tokens that the grammar does not allow next are masked.

llguidance (Microsoft) parses the output and computes which tokens are allowed: a derivative-based lexer under an Earley
parser, walked along a trie of the vocabulary. Its work per token is bounded.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import StructuredOutputError, one_line
from radixkv.sampling.grammar.budget import GrammarBudget

if TYPE_CHECKING:
    import llguidance

TOO_MUCH_WORK = "its regular expressions take too much work to compile: repeat less in them"
# Messages of llguidance about its internals, and what they mean for a specification.
_MEANINGS = types.MappingProxyType(
    {
        "NoExtensionBias": "no answer satisfies it, or none that ends",
        "lexer precomputation failed": TOO_MUCH_WORK,
        "fuel exhausted": TOO_MUCH_WORK,
        "too many expressions constructed": TOO_MUCH_WORK,
    }
)
# Where a grammar forces no token, a draft guesses at most this many in a row.
_MAX_GUESSES = 2


@dataclass(frozen=True)
class GrammarResources:
    """What all grammars of one model share.

    Attributes:
        processor_time: of the calling thread, in seconds.
        wall_time: in seconds.
        threads: fill bitmasks, during which the interpreter's lock is released.
    """

    processor_time: Callable[[], float]
    wall_time: Callable[[], float]
    threads: ThreadPoolExecutor


class GrammarState:
    """The parser state of one sequence in its grammar.

    Drafts are tried on copies: lexer states made and limits hit while guessing must not fail a request.

    Attributes:
        num_tokens: how many tokens a bitmask has bits for; those without logits in the model are never allowed.
        resources: shared with all grammars of the model.
        budget: of the sequence's request.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, num_tokens: int, resources: GrammarResources, budget: GrammarBudget
    ) -> None:
        self._matcher = matcher
        self.num_tokens = num_tokens
        self.resources = resources
        self.budget = budget

    def fork(self) -> GrammarState:
        """An independent copy of this state, for the same request."""
        with self._charged():
            matcher = self._matcher.deep_copy()
        return GrammarState(matcher, self.num_tokens, self.resources, self.budget)

    def for_request(self) -> GrammarState:
        """An independent copy of this state, for a request of its own."""
        return GrammarState(self._matcher.deep_copy(), self.num_tokens, self.resources, GrammarBudget())

    def advance(self, token_id: int) -> None:
        """Consume the token that was appended to the sequence."""
        with self._charged():
            self._matcher.consume_token(token_id)

    @property
    def complete(self) -> bool:
        """Whether no token can follow: the answer has ended, or the grammar allows no continuation."""
        return bool(self._matcher.is_stopped())

    @property
    def failure(self) -> StructuredOutputError | None:
        """Why parsing failed: a token needed more work than the limit; None: it has not."""
        if not self._matcher.is_error():
            return None
        return StructuredOutputError(f"structured_outputs: {error_in_words(self._matcher.get_error())}")

    def likely_tokens(self, last: int, followers: Mapping[int, Sequence[int]], max_tokens: int) -> list[int]:
        """Tokens that spell what must come next; other tokens may spell the same. Changes nothing.

        Args:
            last: the previous token.
            followers: for each token, tokens that may follow it, the likeliest first. Where the grammar leaves a choice, the
                first of them that is allowed is taken, a few times in a row.
            max_tokens: how many tokens to return at most.
        """
        found: list[int] = []
        with self._charged():
            matcher, num_guesses = self._matcher.deep_copy(), 0
            while len(found) < max_tokens and not matcher.is_stopped():
                forced = matcher.compute_ff_tokens()[: max_tokens - len(found)]
                num_guesses = 0 if forced else num_guesses + 1
                if num_guesses > _MAX_GUESSES:
                    break
                candidates = [forced] if forced else [[token] for token in followers.get(last, ())]
                consumed = next((each[:n] for each in candidates if (n := matcher.try_consume_tokens(each))), None)
                if consumed is None:
                    break
                found += consumed
                last = consumed[-1]
        return found

    def num_before_end(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens may come next, one after the other, before one that completes the answer.

        Changes nothing.
        """
        with self._charged():
            matcher = self._matcher.deep_copy()
            count: int = matcher.try_consume_tokens(list(token_ids))
            if count and matcher.is_stopped():
                count -= 1
        return count

    def fill_bitmask(self, bitmask: NDArray[np.int32], row: int, drafts: Sequence[int] = ()) -> float:
        """Set the bits of the allowed next tokens in one row of ``bitmask``, ``[rows, ceil(num_tokens / 32)]``.

        Args:
            drafts: tokens that may come next; each sets one more row, with what is allowed after it. From the first draft on
                that is not allowed, or that completes the answer, rows are left as they are.

        Returns:
            The processor time that it took, which the budget has not been charged with yet.
        """
        from llguidance.numpy import fill_next_token_bitmask

        start = self.resources.processor_time()
        fill_next_token_bitmask(self._matcher, bitmask, row)
        matcher = self._matcher.deep_copy() if drafts else self._matcher
        for following, draft in enumerate(drafts, start=row + 1):
            if not matcher.try_consume_tokens([draft]) or matcher.is_stopped():
                break
            fill_next_token_bitmask(matcher, bitmask, following)
        return self.resources.processor_time() - start

    @contextmanager
    def _charged(self) -> Iterator[None]:
        """Charges the budget with the processor time of what is done within."""
        start = self.resources.processor_time()
        yield
        self.budget.spend(self.resources.processor_time() - start)


def error_in_words(text: str) -> str:
    """What an error message of llguidance means, where that is known; else the message in one line."""
    meaning = next((meaning for words, meaning in _MEANINGS.items() if words in text), None)
    return meaning or one_line(text.replace("<non-verbose/>", ""))
