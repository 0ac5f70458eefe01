"""Calls between ``<｜tool▁calls▁begin｜>`` and ``<｜tool▁calls▁end｜>``.

DeepSeek V3 and R1 write ``function<｜tool▁sep｜>NAME`` and the arguments in a fenced block, V3.1 writes
``NAME<｜tool▁sep｜>ARGUMENTS``. From the chat templates of https://huggingface.co/deepseek-ai/DeepSeek-V3 and
https://huggingface.co/deepseek-ai/DeepSeek-V3.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixkv.tools.definitions import Tool
from radixkv.tools.formats.base import CallFormat, guarded_call, json_text
from radixkv.tools.grammar import GrammarWriter
from radixkv.tools.json_calls import json_arguments
from radixkv.tools.source import AnswerSource, Parsing, accept, collect_until, expect, skip_whitespace, text_until

_CALL_BEGIN, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```"


class DeepSeekV31Format(CallFormat):
    """A name and a JSON object for each call. Both forms are read."""

    begin = "<｜tool▁calls▁begin｜>"
    call_begin = _CALL_BEGIN
    separator = ""
    end = "<｜tool▁calls▁end｜>"

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end, _CALL_BEGIN, _SEPARATOR, _CALL_END)

    def parse(self, source: AnswerSource) -> Parsing[None]:
        while (yield from text_until(source, [self.begin])):
            yield from skip_whitespace(source)
            while (yield from accept(source, _CALL_BEGIN)):
                if not (yield from guarded_call(source, _call(source))):
                    break
                yield from skip_whitespace(source)
                source.mark()
            yield from accept(source, self.end)
            yield from skip_whitespace(source)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{_CALL_BEGIN}{name}{_SEPARATOR}{json_text(arguments)}{_CALL_END}"

    def call_body(self, writer: GrammarWriter, tool: Tool, rule: str) -> str:
        arguments = writer.schema(tool, f"{rule}_arguments", tool.parameters)
        return f"{writer.literal(tool.name + _SEPARATOR)} {arguments} {writer.literal(_CALL_END)}"


class DeepSeekV3Format(DeepSeekV31Format):
    """A type, a name and a fenced JSON object for each call."""

    separator = "\n"

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        fenced = f"{_FENCE}json\n{json_text(arguments)}\n{_FENCE}"
        return f"{_CALL_BEGIN}function{_SEPARATOR}{name}\n{fenced}{_CALL_END}"

    def call_body(self, writer: GrammarWriter, tool: Tool, rule: str) -> str:
        head = writer.literal(f"function{_SEPARATOR}{tool.name}\n{_FENCE}json\n")
        arguments = writer.schema(tool, f"{rule}_arguments", tool.parameters)
        end = writer.literal(f"\n{_FENCE}{_CALL_END}")
        return f"{head} {arguments} {end}"


def _call(source: AnswerSource) -> Parsing[None]:
    name, _ = yield from collect_until(source, [_SEPARATOR])
    yield from skip_whitespace(source)
    if source.peek(1) != "{":
        name, _ = yield from collect_until(source, ["\n"])
        yield from skip_whitespace(source)
        if (yield from accept(source, f"{_FENCE}json")):
            yield from skip_whitespace(source)
    begun = source.begin_call(name.strip())
    yield begun
    yield from json_arguments(source, begun)
    yield from skip_whitespace(source)
    yield from accept(source, _FENCE)
    yield from skip_whitespace(source)
    yield from expect(source, _CALL_END)
