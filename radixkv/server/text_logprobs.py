"""The log-probabilities of the tokens that make up an answer's text, without those of reasoning, calls and markers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import itemgetter

from radixkv.outputs import Logprob
from radixkv.server.logprobs import TextLength
from radixkv.tools.pieces import ReadPiece, TextPiece


class TextLogprobs:
    """Finds the tokens of each piece of text in one answer, as it arrives; see `ReasoningTokens` for how.

    Args:
        length: of the answer's text, empty at first.
    """

    def __init__(self, length: TextLength) -> None:
        self._length = length
        # Those that no piece has reached yet: where in the text each begins and ends, and the log-probabilities there.
        self._tokens: list[tuple[int, int, int, dict[int, Logprob]]] = []

    def read(
        self, token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], pieces: Sequence[ReadPiece]
    ) -> list[list[tuple[int, dict[int, Logprob]]]]:
        """The tokens of each piece, none for one that is no text. One that reaches into the next piece is of the first.

        Args:
            token_ids: the new tokens.
            logprobs: at the place of each.
            pieces: that were read from their text, and from text before it.
        """
        for token_id, entries in zip(token_ids, logprobs, strict=True):
            begin = self._length.characters
            self._length.add(token_id)
            self._tokens.append((begin, self._length.characters, token_id, entries))
        found = []
        for piece, end in pieces:
            num_reached = bisect_left(self._tokens, end, key=itemgetter(0))
            reached = self._tokens[:num_reached]
            del self._tokens[:num_reached]
            text_begin = end - len(piece.text) if isinstance(piece, TextPiece) else None
            found.append(
                [
                    (token_id, entries)
                    for token_begin, token_end, token_id, entries in reached
                    # A token that is only part of a character ends where it begins.
                    if text_begin is not None and (token_end > text_begin or token_begin == text_begin)
                ]
            )
        return found
