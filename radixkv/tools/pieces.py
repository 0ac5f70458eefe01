"""The pieces of which an answer consists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """More of the model's reasoning, which precedes its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A call of a tool begins; the calls of an answer are numbered from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


AnswerPiece = TextPiece | ReasoningPiece | ToolCallBegin | ToolCallArguments


class ReadPiece(NamedTuple):
    """A piece, and how many characters of the answer end with it, as the model wrote it."""

    piece: AnswerPiece
    end: int
