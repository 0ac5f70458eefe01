"""How many of an answer's tokens are reasoning."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from radixkv.server.logprobs import TextLength
from radixkv.tools.pieces import ReadPiece, ReasoningPiece


@dataclass(slots=True)
class _Answer:
    """One answer so far.

    Attributes:
        length: of the text of its tokens.
        begins: where in the text each token begins that no piece has reached yet.
    """

    length: TextLength
    begins: list[int] = field(default_factory=list)


class ReasoningTokens:
    """Counts the tokens of reasoning in the answers to one request, as they arrive.

    Several tokens may arrive at once, or before their text, which is held back while it could be part of a stop string. So
    each token is located in the text, and counts if it begins within a piece of reasoning or in the tag before it::

        text      <think>Thoughts.</think>Yes.
        tokens    |       |      ||        |  |
        counted      1       2  3

    Args:
        new_length: makes the `TextLength` of an answer.

    Attributes:
        count: so far.
    """

    def __init__(self, new_length: Callable[[], TextLength]) -> None:
        self._answers: defaultdict[int, _Answer] = defaultdict(lambda: _Answer(new_length()))
        self.count = 0

    def read(self, choice: int, token_ids: Sequence[int], pieces: Sequence[ReadPiece]) -> None:
        """Count what is new in an answer.

        Args:
            token_ids: the new tokens.
            pieces: that were read from their text, and from text before it.
        """
        answer = self._answers[choice]
        for token_id in token_ids:
            answer.begins.append(answer.length.characters)
            answer.length.add(token_id)
        for piece, end in pieces:
            num_tokens = bisect_left(answer.begins, end)
            del answer.begins[:num_tokens]
            if isinstance(piece, ReasoningPiece):
                self.count += num_tokens
