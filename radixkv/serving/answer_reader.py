"""Splits the answers of a chat into reasoning, text and tool calls, as they arrive."""

from __future__ import annotations

from collections import defaultdict

from radixkv.outputs import RequestOutput
from radixkv.prompts import Prompt
from radixkv.sampling_params import SamplingParams
from radixkv.tools.chat_format import AnswerForm, AnswerParser
from radixkv.tools.pieces import AnswerPiece, ParsedAnswer, ReadPiece, TextPiece


class PieceReader:
    """Reads the text of all answers to one prompt, whose pieces arrive interleaved.

    Args:
        form: of the answers; None: they are text alone.
    """

    def __init__(self, form: AnswerForm | None) -> None:
        self._form = form
        self._parsers: dict[int, AnswerParser] = {}
        self._num_characters: defaultdict[int, int] = defaultdict(int)  # of answers without a form

    def read(self, index: int, text: str, ended: bool) -> list[ReadPiece]:
        """The pieces that an answer's next text holds.

        Args:
            index: of the answer.
            text: new.
            ended: nothing follows it.
        """
        if self._form is None:
            self._num_characters[index] += len(text)
            return [ReadPiece(TextPiece(text), self._num_characters[index])] if text else []
        if index not in self._parsers:
            self._parsers[index] = self._form.parser()
        parser = self._parsers[index]
        return [*parser.feed(text), *(parser.finish() if ended else ())]


class AnswerReader:
    """Reads all answers to one prompt out of the outputs of its request.

    Args:
        prompt: of a conversation; if it has no form of answer, its answers are text alone.
        params: of the request. With ``detokenize=False`` there is no text, and nothing is read.
    """

    def __init__(self, prompt: Prompt, params: SamplingParams) -> None:
        self._has_text = params.detokenize
        self._reader = PieceReader(prompt.answer_form)
        # All those of each answer so far.
        self._pieces: defaultdict[int, list[AnswerPiece]] = defaultdict(list)

    def read(self, output: RequestOutput) -> None:
        """Set the ``pieces`` of each answer that has something new, and the ``answer`` of those that have ended."""
        if not self._has_text:
            return
        for part in output.outputs:
            part.pieces = [piece for piece, _ in self._reader.read(part.index, part.text, part.finished())]
            self._pieces[part.index] += part.pieces
            if part.finished():
                part.answer = ParsedAnswer.of(self._pieces.pop(part.index))
