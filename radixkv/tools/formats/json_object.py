"""``{"name": ..., "arguments": {...}}`` at the start of the answer, one call a line.

For models whose template does not support tools: `radixkv.tools.instructions` describes this form to them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from radixkv.tools.definitions import Tool
from radixkv.tools.formats.base import CallFormat, guarded_call, json_body, json_text, write_json_call
from radixkv.tools.grammar import GrammarWriter
from radixkv.tools.json_calls import json_call
from radixkv.tools.source import AnswerSource, Parsing, skip_whitespace, text_until

# Parts of JSON as regular expressions.
_SPACE = r"[ \t\r\n]*"
_JSON_TOKEN = re.compile(r'"[^"]*"|[:,]')


class JsonObjectFormat(CallFormat):
    """Bare JSON objects, between which there may be whitespace.

    Attributes:
        arguments_key: the key of the arguments.
        before_name: members that may stand before the name, as JSON. No others may: a call is recognised by its name.
    """

    arguments_key = "arguments"
    before_name = ""

    def parse(self, source: AnswerSource) -> Parsing[None]:
        source.mark()
        # Of an answer that may be text, the grammar constrains only what begins like this.
        beginning = None if source.calls_required else re.compile(self.beginning_of_call(source.tools))
        yield from skip_whitespace(source)
        while source.peek(1) == "{":
            if not (yield from guarded_call(source, json_call(source, beginning))):
                break
            beginning = None  # only calls follow
            source.mark()
            yield from self._skip_separator(source)
        else:
            if not source.num_calls:
                source.back_to_mark()
        yield from text_until(source, [])

    def _skip_separator(self, source: AnswerSource) -> Parsing[None]:
        yield from skip_whitespace(source)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return write_json_call(name, arguments, self.arguments_key)

    def call_body(self, writer: GrammarWriter, tool: Tool, rule: str) -> str:
        return json_body(writer, tool, rule, self.arguments_key, self.before_name)

    def beginning_of_call(self, tools: Mapping[str, Tool]) -> str:
        names = "|".join(_in_regex(json_text(name)) for name in tools)
        before = "".join(f"{_in_regex(token)}{_SPACE}" for token in _JSON_TOKEN.findall(self.before_name))
        return rf'({_in_regex(self.lead)})?{_SPACE}\{{{_SPACE}({before})?"name"{_SPACE}:{_SPACE}({names})'


def _in_regex(text: str) -> str:
    """A text as part of a regular expression, in Python and in Lark."""
    # Lark takes a backslash only before what has a meaning of its own.
    return "".join(each if each.isalnum() or each in '_"<>' or not each.isascii() else f"\\{each}" for each in text)
