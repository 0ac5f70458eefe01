"""Answers, put together from their pieces."""

from __future__ import annotations

from typing import NoReturn

from radixkv.tools.pieces import ParsedAnswer, ReasoningPiece, TextPiece, ToolCall, ToolCallArguments, ToolCallBegin


class Joinable(str):
    """Text that can be joined, and not added, which would copy what there is already, once for each piece."""

    def __add__(self, other: str) -> NoReturn:
        raise AssertionError("a piece was added to text")

    __radd__ = __add__


def test_the_pieces_of_an_answer_are_joined_at_once() -> None:
    """Time grew with the square of the length: reading an answer of 64,000 tokens held up the server for seconds."""
    pieces = [
        ReasoningPiece(Joinable("I ")),
        ReasoningPiece(Joinable("think.")),
        TextPiece(Joinable("It ")),
        TextPiece(Joinable("is.")),
        ToolCallBegin(0, "a", "now"),
        ToolCallArguments(0, Joinable("{")),
        ToolCallArguments(0, Joinable("}")),
    ]
    assert ParsedAnswer.of(pieces) == ParsedAnswer("It is.", "I think.", [ToolCall("a", "now", "{}")])
    assert ParsedAnswer.of([]) == ParsedAnswer("", None, [])
