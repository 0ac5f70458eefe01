"""How many of an answer's tokens are reasoning."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from radixkv.outputs import CompletionOutput
from radixkv.tools.pieces import AnswerPiece, ReasoningPiece, TextPiece


@dataclass(slots=True)
class _Tail:
    """What follows the last piece so far: its text may be whitespace before a marker, or a part of one.

    Attributes:
        begins: position in ``text`` where each token begins.
        stop: position where the last of them ends.
    """

    text: bytes = b""
    begins: list[int] = field(default_factory=list)
    stop: int = 0


class ReasoningTokens:
    """Counts the tokens of reasoning in the answers to one request, as they arrive.

    Tokens may arrive several at a time, or before their text, which is held back while it could be part of a stop string. So
    they are laid along the text, and those count that begin within a piece of reasoning, or in the tag before it::

        text      <think>Thoughts.</think>Yes.
        tokens    |       |      ||        |  |
        counted      1       2  3

    Args:
        bytes_of: those of a token's text.

    Attributes:
        count: so far.
    """

    def __init__(self, bytes_of: Callable[[int], Sequence[int]]) -> None:
        self._bytes_of = bytes_of
        self._tails: defaultdict[int, _Tail] = defaultdict(_Tail)
        self.count = 0

    def read(self, choice: int, output: CompletionOutput, pieces: Sequence[AnswerPiece]) -> None:
        """Count what is new in an answer.

        Args:
            choice: the answer's index.
            output: the new tokens and their text, markers included.
            pieces: that were read from it, and from text before it.
        """
        tail = self._tails[choice]
        tail.text += output.text.encode()
        for token_id in output.token_ids:
            tail.begins.append(tail.stop)
            tail.stop += len(self._bytes_of(token_id))
        if not pieces:
            return
        position = 0
        for piece in pieces:
            before = position
            if isinstance(piece, TextPiece | ReasoningPiece):
                text = piece.text.encode()
                position = max(tail.text.find(text, position), position) + len(text)
            if isinstance(piece, ReasoningPiece):
                self.count += sum(before <= begin < position for begin in tail.begins)
        if isinstance(pieces[-1], ReasoningPiece):
            rest = [begin - position for begin in tail.begins if begin >= position]
            self._tails[choice] = _Tail(tail.text[position:], rest, max(0, tail.stop - position))
        else:
            del self._tails[choice]
