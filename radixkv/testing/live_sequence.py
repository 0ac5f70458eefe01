"""A sequence that a checked cache has open, and how reports name it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixkv.testing.story import tokens_in_words


class LiveSequence:
    """A sequence that the checked cache has open.

    Attributes:
        name: A, B, C ... in the description of the steps.
        tokens: its prompt, and what was generated.
        length: how many of them are computed.
        tags: of the computed ones, see `ShadowMemory`.
        num_prompt_tokens: how many of them are the prompt.
        outlived_clear: its namespace was cleared since it was opened.
    """

    def __init__(self, name: str, namespace: str, tokens: list[int], handle: Any) -> None:
        self.name = name
        self.namespace = namespace
        self.tokens = tokens
        self.handle = handle
        self.length = 0
        self.tags: list[int] = []
        self.num_prompt_tokens = len(tokens)
        self.outlived_clear = False

    @property
    def num_pending(self) -> int:
        """Tokens that are still to be computed."""
        return len(self.tokens) - self.length


def growth_in_words(sequence: LiveSequence, tokens: Sequence[int], spare: int) -> str:
    """The step in which a sequence computes these tokens, or only reserves room."""
    if not tokens:
        return f"{sequence.name} reserves room for {spare} more"
    verb = "computes" if sequence.length < sequence.num_prompt_tokens else "generates"
    return f"{sequence.name} {verb} {tokens_in_words(tokens)}" + (f" with room for {spare} more" if spare else "")


def names_of(sequences: Sequence[LiveSequence]) -> str:
    """Their names, one after the other."""
    return " and ".join(sequence.name for sequence in sequences)
