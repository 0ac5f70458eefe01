"""Which tokens of an answer make up each of its pieces."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter
from typing import NamedTuple

from radixkv.outputs import CompletionOutput, Logprob
from radixkv.server.output.logprobs import TextLength
from radixkv.tools.pieces import AnswerPiece, ReadPiece, ReasoningPiece, TextPiece


class AnswerToken(NamedTuple):
    """A token of an answer.

    Attributes:
        begin, end: where in the answer's text.
        logprobs: at its place; empty where none were asked for.
    """

    token_id: int
    begin: int
    end: int
    logprobs: dict[int, Logprob]


class LocatedPiece(NamedTuple):
    """A piece, and its tokens if it is text."""

    piece: AnswerPiece
    tokens: Sequence[AnswerToken]


class AnswerTokens:
    """Finds the tokens of each piece of one answer, as it arrives.

    Several tokens may arrive at once, or before their text, which is held back while it could be part of a stop string. So
    each token is located in the text. It is one of the piece within which it begins, or in the tag before which; of these,
    a text has only those that reach into it::

        text      <think>Thoughts.</think>Yes.
        tokens    |       |      ||        |  |
        piece        1       1  1     2     2

    A token that is left out of the text is one of the reasoning, if that ends where it is.

    Attributes:
        num_reasoning: how many tokens the reasoning has so far.

    Args:
        length: of the answer's text, empty at first.
    """

    def __init__(self, length: TextLength) -> None:
        self.num_reasoning = 0
        self._length = length
        self._unreached: list[AnswerToken] = []  # by any piece so far
        self._reasoning_end = -1  # if the last piece is reasoning

    def locate(self, output: CompletionOutput, pieces: Sequence[ReadPiece]) -> list[LocatedPiece]:
        """The pieces with their tokens.

        Args:
            output: the answer's new tokens.
            pieces: that were read from their text, and from text before it.
        """
        token_ids = output.token_ids
        for token_id, logprobs in zip(token_ids, output.logprobs or repeat({}, len(token_ids)), strict=True):
            begin = self._length.characters
            self._length.add(token_id)
            self._unreached.append(AnswerToken(token_id, begin, self._length.characters, logprobs))
        self._count_behind_reasoning()
        return [LocatedPiece(piece, self._take(piece, end)) for piece, end in pieces]

    def _take(self, piece: AnswerPiece, end: int) -> list[AnswerToken]:
        """The tokens of the next piece, which no later one has."""
        num_reached = bisect_left(self._unreached, end, key=attrgetter("begin"))
        reached = self._unreached[:num_reached]
        del self._unreached[:num_reached]
        self._reasoning_end = -1
        if isinstance(piece, ReasoningPiece):
            self.num_reasoning += num_reached
            self._reasoning_end = end
            self._count_behind_reasoning()
        if not isinstance(piece, TextPiece):
            return []
        begin = end - len(piece.text)
        # A token that is only part of a character ends where it begins.
        return [token for token in reached if token.end > begin or token.begin == begin]

    def _count_behind_reasoning(self) -> None:
        num_behind = bisect_right(self._unreached, self._reasoning_end, key=attrgetter("end"))
        del self._unreached[:num_behind]
        self.num_reasoning += num_behind
