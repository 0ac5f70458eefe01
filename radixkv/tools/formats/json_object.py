"""``{"name": ..., "arguments": {...}}`` at the start of the answer, one call a line.

For models whose template does not support tools: `radixkv.tools.instructions` describes this form to them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from radixkv.tools.definitions import Tool, ToolOptions
from radixkv.tools.formats.base import CallFormat, guarded_call, json_body, write_json_call
from radixkv.tools.grammar import GrammarWriter
from radixkv.tools.json_calls import json_call
from radixkv.tools.source import AnswerSource, Parsing, skip_whitespace, text_until


class JsonObjectFormat(CallFormat):
    """Bare JSON objects, between which there may be whitespace."""

    arguments_key = "arguments"

    def parse(self, source: AnswerSource) -> Parsing[None]:
        source.mark()
        yield from skip_whitespace(source)
        while source.rest[:1] == "{":
            if not (yield from guarded_call(source, json_call(source))):
                break
            source.mark()
            yield from self._skip_separator(source)
        else:
            if not source.num_calls:
                source.rest = source.since_mark() + source.rest
        yield from text_until(source, [])

    def _skip_separator(self, source: AnswerSource) -> Parsing[None]:
        yield from skip_whitespace(source)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return write_json_call(name, arguments, self.arguments_key)

    def call_body(self, writer: GrammarWriter, tool: Tool, rule: str) -> str:
        return json_body(writer, tool, rule, self.arguments_key)

    def _beginning_of_call(self, options: ToolOptions) -> str:
        names = "|".join(_in_regex(json.dumps(name)) for name in options.tools)
        return rf'[ \t\r\n]*\{{[ \t\r\n]*"name"[ \t\r\n]*:[ \t\r\n]*({names})'


def _in_regex(text: str) -> str:
    return "".join(each if each.isalnum() or each in '_"' else f"\\{each}" for each in text)
