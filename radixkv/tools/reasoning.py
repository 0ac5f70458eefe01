"""Reasoning between tags, before the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from radixkv.tools.grammar import GrammarWriter
from radixkv.tools.pieces import ReasoningPiece
from radixkv.tools.source import AnswerSource, Parsing, accept, skip_whitespace, text_until

# Where an answer begins: within reasoning that the prompt has opened, after it, or before it, so that the model may open it.
ReasoningState = Literal["open", "over", "possible"]


@dataclass(frozen=True)
class ReasoningTags:
    """The tags between which a model thinks."""

    open: str
    close: str

    def state_after(self, prompt: str) -> ReasoningState:
        """Where the answer to a prompt begins; the prompt ends where the assistant's message begins."""
        end = prompt.rstrip()
        return "open" if end.endswith(self.open) else "over" if end.endswith(self.close) else "possible"

    def state_within(self, message: str) -> ReasoningState:
        """Where an answer begins that continues the assistant's message."""
        return "open" if message.rfind(self.open) > message.rfind(self.close) else "over"

    def parse(self, source: AnswerSource, state: ReasoningState) -> Parsing[None]:
        """Read the reasoning, if there is any, and the whitespace after it and at its beginning.

        Where the model may open it, its end alone says that there is none.
        """
        if state == "possible":
            source.mark()
            yield from skip_whitespace(source)
            if (yield from accept(source, self.close)):
                yield from skip_whitespace(source)
                return
            if not (yield from accept(source, self.open)):
                source.back_to_mark()
                return
        elif state == "over":
            return
        if not source.continues:
            yield from skip_whitespace(source)
        yield from text_until(source, [self.close], ReasoningPiece)
        yield from skip_whitespace(source)

    def grammar(self, writer: GrammarWriter, state: ReasoningState) -> str:
        """A grammar expression for the reasoning."""
        if state == "over":
            return ""
        writer.rule("LINES", r"/[\r\n]{0,2}/")
        thought = f"{writer.text_before(self.close)} LINES"
        if state == "open":
            return thought
        return f"({writer.literal(self.open)} {thought} | {writer.literal(self.close)} LINES)?"


THINK = ReasoningTags("<think>", "</think>")
MISTRAL_THINK = ReasoningTags("[THINK]", "[/THINK]")
