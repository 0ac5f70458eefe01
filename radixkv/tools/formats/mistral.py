"""``[TOOL_CALLS]`` and a JSON list of calls, or, since tokenizer version 11, ``[TOOL_CALLS]name[ARGS]{...}`` for each call.

Mistral AI: https://docs.mistral.ai/capabilities/function_calling and
https://github.com/mistralai/mistral-common (``tokens/tokenizers/instruct.py``).
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping
from typing import Any

from radixkv.tools.definitions import Tool
from radixkv.tools.formats.base import CallFormat, guarded_call, json_body, json_text, write_json_call
from radixkv.tools.grammar import GrammarWriter
from radixkv.tools.json_calls import json_arguments, json_call
from radixkv.tools.source import AnswerSource, Parsing, accept, collect_until, skip_whitespace, text_until

_BEGIN, _ARGUMENTS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralFormat(CallFormat):
    """A JSON list of calls after a marker. Both forms are read."""

    begin = f"{_BEGIN}["
    separator = ", "
    end = "]"

    @property
    def markers(self) -> tuple[str, ...]:
        return (_BEGIN, _ARGUMENTS, _CALL_ID)

    def new_id(self) -> str:
        """An id of nine letters and digits, as the templates demand."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def parse(self, source: AnswerSource) -> Parsing[None]:
        while (yield from text_until(source, [_BEGIN])):
            yield from skip_whitespace(source)
            if source.peek(1) == "[":
                source.take(1)
                yield from _list(source)
            else:
                yield from guarded_call(source, _named_call(source))
            yield from skip_whitespace(source)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return write_json_call(name, arguments, "arguments")

    def call_body(self, writer: GrammarWriter, tool: Tool, rule: str) -> str:
        return json_body(writer, tool, rule, "arguments")


class MistralNamedFormat(MistralFormat):
    """A marker, a name and a JSON object for each call."""

    begin = ""
    call_begin = _BEGIN
    separator = ""
    end = ""

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{_BEGIN}{name}{_ARGUMENTS}{json_text(arguments)}"

    def call_body(self, writer: GrammarWriter, tool: Tool, rule: str) -> str:
        return f"{writer.literal(tool.name + _ARGUMENTS)} {writer.schema(tool, f'{rule}_arguments', tool.parameters)}"


def _list(source: AnswerSource) -> Parsing[None]:
    while True:
        yield from skip_whitespace(source)
        if not (yield from guarded_call(source, json_call(source))):
            return
        yield from skip_whitespace(source)
        source.mark()
        if not (yield from accept(source, ",")):
            yield from accept(source, "]")
            return


def _named_call(source: AnswerSource) -> Parsing[None]:
    name, marker = yield from collect_until(source, [_ARGUMENTS, _CALL_ID])
    if marker == _CALL_ID:
        yield from collect_until(source, [_ARGUMENTS])
    begun = source.begin_call(name.strip())
    yield begun
    yield from skip_whitespace(source)
    yield from json_arguments(source, begun)
