"""``name(key="value", other=3)``: calls in Python's syntax, between markers.

LiquidAI's LFM2 and LFM2.5: the model card of https://huggingface.co/LiquidAI/LFM2-1.2B. Ai2's Olmo 3: the chat template of
https://huggingface.co/allenai/Olmo-3-7B-Instruct, which writes values as JSON.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from radixkv.tools.definitions import Tool
from radixkv.tools.formats.argument_values import ArgumentsAsJson, described_properties
from radixkv.tools.formats.base import CallFormat, guarded_call, json_text
from radixkv.tools.formats.element_grammar import in_order
from radixkv.tools.formats.python_values import WORDS, PythonValues
from radixkv.tools.grammar import GrammarWriter
from radixkv.tools.source import (
    AnswerSource,
    MalformedCallError,
    Parsing,
    accept,
    collect_until,
    skip_whitespace,
    text_until,
)

_QUOTES = ("'", '"')
_JSON_WORDS: Mapping[str, bool | None] = MappingProxyType({"true": True, "false": False, "null": None})
# The file name under which literals are parsed, of which Python would print warnings, such as that \d is no escape.
_SOURCE = "<call of a tool>"
warnings.filterwarnings("ignore", module=re.escape(_SOURCE))
_NO_LITERALS = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)


class PythonFormat(CallFormat):
    """Calls of functions with arguments by keyword.

    Args:
        marker: begins the calls of an answer.
        opening: follows it; it may be empty.
        separator: between two calls.
        closing: after the last call; it may be empty.
        end_marker: follows it.
    """

    def __init__(self, marker: str, opening: str, separator: str, closing: str, end_marker: str) -> None:
        self._marker = marker
        self._opening = opening
        self._closing = closing
        self._end_marker = end_marker
        self.begin = f"{marker}{opening}"
        self.separator = separator
        self.end = f"{closing}{end_marker}"

    @property
    def markers(self) -> tuple[str, ...]:
        return (self._marker, self._end_marker)

    def parse(self, source: AnswerSource) -> Parsing[None]:
        while (yield from text_until(source, [self._marker])):
            yield from skip_whitespace(source)
            yield from accept(source, self._opening)
            yield from skip_whitespace(source)
            while not (yield from accept(source, self._closing or self._end_marker)):
                if not (yield from guarded_call(source, _call(source))):
                    break
                source.mark()
                yield from skip_whitespace(source)
                yield from accept(source, ",")
                yield from skip_whitespace(source)
            yield from skip_whitespace(source)
            yield from accept(source, self._end_marker)
            yield from skip_whitespace(source)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        texts = (f"{key}={_written(value)}" for key, value in arguments.items())
        return f"{name}({', '.join(texts)})"

    def call_body(self, writer: GrammarWriter, tool: Tool, rule: str) -> str:
        required, values = tool.parameters.get("required", ()), PythonValues(writer, tool)
        arguments = [
            (f"{writer.literal(f'{key}=')} ({values.expression(schema, f'{rule}_{index}_value')})", key in required)
            for index, (key, schema) in enumerate(described_properties(tool.parameters).items())
        ]
        return f"{writer.literal(f'{tool.name}(')} ({in_order(writer, rule, arguments, ', ', ')')})"


LFM2 = PythonFormat("<|tool_call_start|>", "[", ", ", "]", "<|tool_call_end|>")
OLMO3 = PythonFormat("<function_calls>", "", "\n", "", "</function_calls>")


def _written(value: Any) -> str:
    return WORDS[value] if value is None or isinstance(value, bool) else json_text(value)


def _call(source: AnswerSource) -> Parsing[None]:
    name, _ = yield from collect_until(source, ["("])
    begun = source.begin_call(name.strip())
    yield begun
    arguments = ArgumentsAsJson(begun, source.tools[begun.name])
    yield from skip_whitespace(source)
    while not (yield from accept(source, ")")):
        key, _ = yield from collect_until(source, ["="])
        text = yield from _value_text(source)
        yield arguments.add_json(key.strip(), _as_json(text))
        yield from accept(source, ",")
        yield from skip_whitespace(source)
    yield arguments.end()


def _value_text(source: AnswerSource) -> Parsing[str]:
    """The text of a value, up to the comma or the bracket that follows it.

    Raises:
        MalformedCallError: none follows.
    """
    texts: list[str] = []
    depth, quote, escaped = 0, "", False
    while True:
        for position, character in enumerate(source):
            if escaped:
                escaped = False
            elif quote:
                escaped = character == "\\"
                quote = "" if character == quote else quote
            elif character in _QUOTES:
                quote = character
            elif depth == 0 and character in ",)":
                return "".join([*texts, source.take(position)]).strip()
            else:
                depth += (character in "([{") - (character in ")]}")
        texts.append(source.take(len(source)))
        if source.ended:
            raise MalformedCallError
        yield None


class _JsonWords(ast.NodeTransformer):
    """Replaces JSON's words, which may stand among Python's literals."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node


def _as_json(text: str) -> str:
    """A value as JSON text: JSON stays as it is, Python's literals become JSON, and all else a string."""
    try:
        json.loads(text, parse_constant=int)  # which refuses NaN and Infinity: no JSON
        return text
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(_JsonWords().visit(ast.parse(text, _SOURCE, "eval")))
        # In ASCII, halves of surrogate pairs stay escapes, of which JSON makes characters, and which UTF-8 can hold.
        return json.dumps(value, allow_nan=False)
    except _NO_LITERALS:
        # Some templates write strings as they are, between quotes.
        is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in _QUOTES
        return json_text(text[1:-1] if is_quoted else text)
