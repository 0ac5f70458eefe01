"""How many of an answer's tokens are reasoning."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from radixkv.outputs import CompletionOutput
from radixkv.server.logprobs import TextLength
from radixkv.tools.pieces import AnswerPiece, ReasoningPiece, TextPiece


@dataclass(slots=True)
class _Answer:
    """One answer so far.

    Attributes:
        length: of the text of its tokens.
        position: how many characters end with the last piece.
        rest: the text that follows it: it may be whitespace before a marker, or a part of one.
        begins: position of each token that begins there or later.
    """

    length: TextLength
    position: int = 0
    rest: str = ""
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

    def read(self, choice: int, output: CompletionOutput, pieces: Sequence[AnswerPiece]) -> None:
        """Count what is new in an answer.

        Args:
            output: the new tokens and their text, markers included.
            pieces: that were read from it, and from text before it.
        """
        answer = self._answers[choice]
        answer.rest += output.text
        for token_id in output.token_ids:
            answer.begins.append(answer.length.characters)
            answer.length.add(token_id)
        for piece in pieces:
            if not isinstance(piece, TextPiece | ReasoningPiece):
                continue
            end = answer.rest.index(piece.text) + len(piece.text)
            answer.rest = answer.rest[end:]
            answer.position += end
            num_tokens = bisect_left(answer.begins, answer.position)
            del answer.begins[:num_tokens]
            if isinstance(piece, ReasoningPiece):
                self.count += num_tokens
        if pieces and not isinstance(pieces[-1], TextPiece | ReasoningPiece):
            # Where the call ends is unknown; a thought that follows it begins with the tokens that arrive next.
            del answer.begins[: bisect_left(answer.begins, answer.position + len(answer.rest))]
