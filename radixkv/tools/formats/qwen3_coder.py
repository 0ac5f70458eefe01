"""``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``: strings as they are, others as JSON.

Qwen3-Coder and Qwen 3.5: the chat template of https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from radixkv.tools.definitions import Tool
from radixkv.tools.formats.base import CallFormat, as_object, json_text, marked_calls
from radixkv.tools.grammar import GrammarWriter
from radixkv.tools.pieces import ToolCallArguments
from radixkv.tools.source import AnswerSource, Parsing, collect_until, expect, skip_whitespace, starts_with

_END, _FUNCTION, _FUNCTION_END = "</tool_call>", "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "\n</parameter>"
# The schema of a required argument that is not described; it is read as text.
_ANY_STRING = MappingProxyType({"type": "string"})
# Constraints of strings that cannot be enforced on their plain text; lengths can where the values are named.
_STRING_CONSTRAINTS = frozenset("pattern format minLength maxLength allOf anyOf oneOf not if".split())
_LENGTHS = frozenset({"minLength", "maxLength"})


class Qwen3CoderFormat(CallFormat):
    """An element for each call, and in it one for each argument."""

    call_begin = "<tool_call>"

    def as_template_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The template writes each argument of a call, so it needs an object of them."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        functions = [{**call["function"], "arguments": as_object(call["function"]["arguments"])} for call in calls]
        written = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
        return {**message, "tool_calls": written}

    def parse(self, source: AnswerSource) -> Parsing[None]:
        return marked_calls(source, self.call_begin, _call)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        texts = {key: value if isinstance(value, str) else json_text(value) for key, value in arguments.items()}
        parameters = "".join(f"{_PARAMETER}{key}>\n{text}{_PARAMETER_END}\n" for key, text in texts.items())
        return f"{self.call_begin}\n{_FUNCTION}{name}>\n{parameters}{_FUNCTION_END}\n{_END}"

    def call_body(self, writer: GrammarWriter, tool: Tool, rule: str) -> str:
        required = tool.parameters.get("required", ())
        undescribed = [key for key in required if isinstance(key, str) and key not in tool.parameters["properties"]]
        properties = {**tool.parameters["properties"], **dict.fromkeys(undescribed, _ANY_STRING)}
        parts = [writer.literal(f"\n{_FUNCTION}{tool.name}>\n")]
        for index, (key, schema) in enumerate(properties.items()):
            value = self._value(writer, tool, schema, f"{rule}_{index}")
            begin, newline = writer.literal(f"{_PARAMETER}{key}>\n"), writer.literal("\n")
            part = f"{begin} {value} {newline}"
            parts.append(part if key in required else f"({part})?")
        return " ".join([*parts, writer.literal(f"{_FUNCTION_END}\n{_END}")])

    def _value(self, writer: GrammarWriter, tool: Tool, schema: Any, rule: str) -> str:
        """A grammar expression for the value of one argument and the end of its element."""
        end = writer.literal(_PARAMETER_END)
        if not _is_string(schema):
            definitions = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
            whole = {**schema, **definitions} if isinstance(schema, Mapping) else {}
            return f"{writer.schema(tool, rule, whole)} {end}"
        values = _values(schema)
        constraints = _STRING_CONSTRAINTS & set(schema) - (_LENGTHS if values is not None else frozenset())
        if tool.strict and constraints:
            named = ", ".join(sorted(constraints))
            raise ValueError(
                f"tools: {tool.name}: {named} of a string cannot be enforced in this model's form of calls"
            )
        if values is not None:
            values = [value for value in values if _has_length(value, schema)] or values
            return f"({' | '.join(writer.literal(value) for value in values)}) {end}"
        return writer.text_before(_PARAMETER_END)


def _is_string(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    values = _values(schema)
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return True
    return schema.get("type") == "string" and values is None


def _has_length(value: str, schema: Mapping[str, Any]) -> bool:
    least, most = schema.get("minLength"), schema.get("maxLength")
    return not (
        (isinstance(least, int | float) and len(value) < least) or (isinstance(most, int | float) and len(value) > most)
    )


def _values(schema: Mapping[str, Any]) -> Any:
    """The only values that a schema allows, if it names them; else None."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _call(source: AnswerSource) -> Parsing[None]:
    yield from skip_whitespace(source)
    yield from expect(source, _FUNCTION)
    name, _ = yield from collect_until(source, [">"])
    begun = source.begin_call(name)
    yield begun
    properties = source.tools[name].parameters["properties"]
    separator = "{"
    yield from skip_whitespace(source)
    while (yield from starts_with(source, _PARAMETER)):
        key, _ = yield from collect_until(source, [">"])
        # As in the grammar, the tag alone does not end a value that has lines of its own: it may be part of it.
        has_lines = yield from starts_with(source, "\n")
        ends = [_PARAMETER_END] if has_lines else [_PARAMETER_END, _PARAMETER_END.strip()]
        text, _ = yield from collect_until(source, ends)
        value = _as_json(text, properties.get(key))
        yield ToolCallArguments(begun.index, f"{separator}{json_text(key)}: {value}")
        separator = ", "
        yield from skip_whitespace(source)
    yield from expect(source, _FUNCTION_END)  # before it, the arguments must not look complete
    yield ToolCallArguments(begun.index, "{}" if separator == "{" else "}")
    yield from skip_whitespace(source)
    yield from expect(source, _END)


def _as_json(text: str, schema: Any) -> str:
    """A value as JSON text: valid JSON stays as it is, unless the schema asks for a string or says nothing; else a string."""
    if schema is not None and not _is_string(schema):
        try:
            json.loads(text, parse_constant=int)  # which refuses NaN and Infinity: no JSON
            return text
        except (ValueError, RecursionError):
            pass
    return json_text(text)
