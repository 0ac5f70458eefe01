"""Calls with an element for each argument, in which strings stand as they are and all other values as JSON.

What the forms of Qwen3-Coder and GLM have in common.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from radixkv.tools.definitions import Tool
from radixkv.tools.formats.base import CallFormat, as_object, json_text, marked_calls
from radixkv.tools.grammar import GrammarWriter
from radixkv.tools.pieces import ToolCallArguments, ToolCallBegin
from radixkv.tools.source import AnswerSource, Parsing

# The schema of a required argument that is not described; it is read as text.
_ANY_STRING = MappingProxyType({"type": "string"})
# Constraints of strings that cannot be enforced on their plain text; lengths can where the values are named.
_STRING_CONSTRAINTS = frozenset("pattern format minLength maxLength allOf anyOf oneOf not if".split())
_LENGTHS = frozenset({"minLength", "maxLength"})


class ArgumentElements(CallFormat):
    """An element for each call, and in it one for each argument.

    Attributes:
        call_end: ends each call.
        value_end: ends the value of each argument.
    """

    call_begin = "<tool_call>"
    call_end = "</tool_call>"
    value_end: str

    def as_template_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The template writes each argument of a call, so it needs an object of them."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        functions = [{**call["function"], "arguments": as_object(call["function"]["arguments"])} for call in calls]
        written = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
        return {**message, "tool_calls": written}

    def parse(self, source: AnswerSource) -> Parsing[None]:
        return marked_calls(source, self.call_begin, self.read_call)

    @abstractmethod
    def read_call(self, source: AnswerSource) -> Parsing[None]:
        """Read a call, after ``call_begin``."""

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        texts = {key: value if isinstance(value, str) else json_text(value) for key, value in arguments.items()}
        return f"{self.call_begin}{self.write_elements(name, texts)}{self.call_end}"

    @abstractmethod
    def write_elements(self, name: str, values: Mapping[str, str]) -> str:
        """What stands between ``call_begin`` and ``call_end`` for these texts of arguments."""

    def call_body(self, writer: GrammarWriter, tool: Tool, rule: str) -> str:
        required = tool.parameters.get("required", ())
        undescribed = [key for key in required if isinstance(key, str) and key not in tool.parameters["properties"]]
        properties = {**tool.parameters["properties"], **dict.fromkeys(undescribed, _ANY_STRING)}
        parts = [self.name_expression(writer, tool.name)]
        for index, (key, schema) in enumerate(properties.items()):
            part = self.argument_expression(writer, key, self._value(writer, tool, schema, f"{rule}_{index}"))
            parts.append(part if key in required else f"({part})?")
        return " ".join([*parts, self.end_expression(writer)])

    @abstractmethod
    def name_expression(self, writer: GrammarWriter, name: str) -> str:
        """A grammar expression for what stands between ``call_begin`` and the arguments."""

    @abstractmethod
    def argument_expression(self, writer: GrammarWriter, key: str, value: str) -> str:
        """A grammar expression for an argument; ``value`` is one for its value and ``value_end``."""

    @abstractmethod
    def end_expression(self, writer: GrammarWriter) -> str:
        """A grammar expression for what follows the arguments, ``call_end`` included."""

    def _value(self, writer: GrammarWriter, tool: Tool, schema: Any, rule: str) -> str:
        end = writer.literal(self.value_end)
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
        return writer.text_before(self.value_end)


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


class ArgumentsAsJson:
    """Turns the arguments of a call, as they are read, into the text of a JSON object.

    Args:
        call: whose arguments they are.
        tool: that is called.
    """

    def __init__(self, call: ToolCallBegin, tool: Tool) -> None:
        self._index = call.index
        self._properties = tool.parameters["properties"]
        self._separator = "{"

    def add(self, key: str, text: str) -> ToolCallArguments:
        """The next argument, with the text of its value."""
        piece = f"{self._separator}{json_text(key)}: {_as_json(text, self._properties.get(key))}"
        self._separator = ", "
        return ToolCallArguments(self._index, piece)

    def end(self) -> ToolCallArguments:
        """There are no more."""
        return ToolCallArguments(self._index, "{}" if self._separator == "{" else "}")


def _as_json(text: str, schema: Any) -> str:
    """A value as JSON text: valid JSON stays as it is, unless the schema asks for a string or says nothing; else a string."""
    if schema is not None and not _is_string(schema):
        try:
            json.loads(text, parse_constant=int)  # which refuses NaN and Infinity: no JSON
            return text
        except (ValueError, RecursionError):
            pass
    return json_text(text)
