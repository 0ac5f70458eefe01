"""Takes the answers of a streamed chat apart: reasoning, text and tool calls, as they come."""

from __future__ import annotations

from radixkv.outputs import RequestOutput
from radixkv.prompts import Prompt
from radixkv.tools.chat_format import AnswerParser
from radixkv.tools.definitions import parsed_answer
from radixkv.tools.events import AnswerPiece, TextPiece


class AnswerReader:
    """Reads all answers to one prompt, which come in pieces of each in turn.

    Args:
        prompt: of a conversation; one that has no form of answer is answered by text alone.
    """

    def __init__(self, prompt: Prompt) -> None:
        self._form = prompt.answer_form
        self._parsers: dict[int, AnswerParser] = {}
        self._pieces: dict[int, list[AnswerPiece]] = {}

    def read(self, output: RequestOutput) -> None:
        """Set the ``pieces`` of each answer that has something new, and the ``answer`` of those that have ended."""
        for part in output.outputs:
            part.pieces = self._read(part.index, part.text, part.finished())
            self._pieces.setdefault(part.index, []).extend(part.pieces)
            if part.finished():
                part.answer = parsed_answer(self._pieces[part.index])

    def _read(self, index: int, text: str, ended: bool) -> list[AnswerPiece]:
        if self._form is None:
            return [TextPiece(text)] if text else []
        if index not in self._parsers:
            self._parsers[index] = self._form.parser()
        parser = self._parsers[index]
        return [*parser.feed(text), *(parser.finish() if ended else ())]
