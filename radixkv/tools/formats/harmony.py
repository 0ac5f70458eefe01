"""Messages in channels: ``<|channel|>analysis<|message|>...<|end|>``, then ``final``, or ``commentary to=functions.NAME``.

OpenAI's gpt-oss: https://github.com/openai/harmony (docs/format.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from radixkv.tools.definitions import Tool, ToolOptions
from radixkv.tools.formats.base import CallFormat, guarded_call, json_text
from radixkv.tools.grammar import GrammarWriter
from radixkv.tools.json_calls import json_arguments
from radixkv.tools.pieces import ReasoningPiece, TextPiece
from radixkv.tools.source import (
    AnswerSource,
    MalformedCallError,
    Parsing,
    accept,
    collect_until,
    skip_whitespace,
    text_until,
)

_START, _CHANNEL, _MESSAGE, _END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
_CALL, _RETURN, _CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
_ENDS = (_END, _CALL, _RETURN, _START)
_NEXT = f"{_END}{_START}assistant"
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


class HarmonyFormat(CallFormat):
    """Reasoning, calls and text are messages of one answer. An answer has one call at most, which ends it."""

    parallel = False
    frames_every_answer = True

    @property
    def markers(self) -> tuple[str, ...]:
        return (_START, _CHANNEL, _MESSAGE, _END, _CALL, _RETURN, _CONSTRAIN)

    def as_template_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The template calls reasoning "thinking", and refuses it beside text and calls."""
        thought = message.get("reasoning_content")
        if message["content"] and message.get("tool_calls"):
            # Under neither name: transformers gives a thought that has one of them the other, too.
            return {name: value for name, value in message.items() if name not in ("reasoning_content", "thinking")}
        return {**message, "thinking": thought} if thought else message

    def parse(self, source: AnswerSource) -> Parsing[None]:
        if source.continues:
            yield from text_until(source, _ENDS)
            yield from accept(source, _START)
        source.mark()
        while (yield from _starts_message(source)):
            header = yield from _header(source)
            if header is None:
                return
            recipient = _RECIPIENT.search(header)
            if recipient is not None:
                yield from guarded_call(source, _call(source, recipient[1]))
                source.mark()
            is_reasoning = f"{_CHANNEL}analysis" in header
            yield from text_until(source, _ENDS, ReasoningPiece if is_reasoning else TextPiece)
            yield from accept(source, _START)
            source.mark()
        yield from text_until(source, _ENDS)  # the rest of a message that was begun before the answer

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{self._header(name)}{json_text(arguments)}{_CALL}"

    def call_body(self, writer: GrammarWriter, tool: Tool, rule: str) -> str:
        return f"{writer.literal(self._header(tool.name))} {writer.schema(tool, f'{rule}_arguments', tool.parameters)}"

    def grammar(
        self, writer: GrammarWriter, options: ToolOptions | None, content: str | None, *, continues: bool = False
    ) -> str:
        def message(channel: str, body: str, end: str = "") -> str:
            return f"{writer.literal(f'{_CHANNEL}{channel}{_MESSAGE}')} {body} {writer.literal(end) if end else ''}"

        writer.rule("thought", message("analysis", "TEXT", _NEXT))
        endings: list[str] = []
        if options is None or options.mode != "required":
            endings.append(message("final", content or "TEXT"))
        if options is not None and options.mode != "none":
            endings.append(self._calls(writer, options)[0])
        before = "thought*"
        if options is not None and options.mode == "auto":
            writer.rule("preamble", message("commentary", "TEXT", _NEXT))
            before = "(thought | preamble)*"
        answer = f"{before} ({' | '.join(endings)})"
        if not continues:
            return answer
        # The rest of a message, after which others may follow only where there may be calls.
        if options is None or options.mode == "none":
            return content or "TEXT"
        following = f"{writer.literal(_NEXT)} {answer}"
        return following if options.mode == "required" else f"{content or 'TEXT'} | TEXT {following}"

    def _header(self, name: str) -> str:
        return f"{_CHANNEL}commentary to=functions.{name} {_CONSTRAIN}json{_MESSAGE}"


def _starts_message(source: AnswerSource) -> Parsing[bool]:
    """Whether a message begins here, rather than the text of one."""
    yield from accept(source, _START)
    yield from accept(source, "assistant")
    yield from skip_whitespace(source)
    if (yield from accept(source, _CHANNEL)):
        return True
    return (yield from accept(source, "to="))


def _header(source: AnswerSource) -> Parsing[str | None]:
    """The rest of a header; None: the answer ended in it."""
    before = source.since_mark()
    try:
        text, _ = yield from collect_until(source, [_MESSAGE])
    except MalformedCallError:
        return None
    return before + text


def _call(source: AnswerSource, name: str) -> Parsing[None]:
    begun = source.begin_call(name)
    yield begun
    yield from skip_whitespace(source)
    yield from json_arguments(source, begun)
