"""Values of arguments that stand by themselves: strings as they are and all others as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.tools.definitions import Tool
from radixkv.tools.formats.base import json_text
from radixkv.tools.formats.schema_kinds import ANY_STRING, SchemaKinds, is_string
from radixkv.tools.grammar import GrammarWriter
from radixkv.tools.pieces import ToolCallArguments, ToolCallBegin
from radixkv.tools.schema_values import is_of_type, named_values, widest_type
from radixkv.tools.source import WHITESPACE

# Constraints of strings that cannot be enforced on their plain text; lengths can where the values are named.
_STRING_CONSTRAINTS = frozenset("pattern format minLength maxLength allOf anyOf oneOf not if".split())
_LENGTHS = frozenset({"minLength", "maxLength"})
_DEFINITIONS = ("$defs", "definitions")


def described_properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of each property of an object, those included that are required and described by no name of their own.

    Of these, one that is not described at all is text.
    """
    properties, others = schema["properties"], schema.get("additionalProperties")
    required = schema.get("required", ())
    undescribed = [key for key in required if isinstance(key, str) and key not in properties]
    return {
        **properties,
        **dict.fromkeys(undescribed, others if isinstance(others, Mapping) and others else ANY_STRING),
    }


def value_before(writer: GrammarWriter, tool: Tool, schema: Any, rule: str, end: str) -> str:
    """A grammar expression for an argument's value and the text that ends it.

    Args:
        rule: names its schema.

    Raises:
        ValueError: the tool is strict and the schema cannot be enforced.
    """
    as_tokens = writer.literal(end)
    if not is_string(schema):
        return f"{writer.schema(tool, rule, with_definitions(schema, tool))} {as_tokens}"
    values = named_values(schema)
    constraints = _STRING_CONSTRAINTS & set(schema) - (_LENGTHS if values is not None else frozenset())
    if tool.strict and constraints:
        named = ", ".join(sorted(constraints))
        raise ValueError(f"tools: {tool.name}: {named} of a string cannot be enforced in this model's form of calls")
    if values is not None:
        values = [value for value in values if _has_length(value, schema)] or values
        return f"({' | '.join(writer.literal(value) for value in values)}) {as_tokens}"
    return writer.text_before(end)


def with_definitions(schema: Any, tool: Tool) -> Mapping[str, Any]:
    """A part of a tool's parameters as a schema of its own, with the definitions to which it leads."""
    if not isinstance(schema, Mapping):
        return {}
    needed: dict[str, dict[str, Any]] = {}
    pending: list[Any] = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, Mapping):
            pending += part.values()
            keyword, _, name = str(part.get("$ref")).removeprefix("#/").partition("/")
            definitions = tool.parameters.get(keyword) if keyword in _DEFINITIONS else None
            if not isinstance(definitions, Mapping) or name in needed.get(keyword, {}):
                continue
            if name not in definitions:  # it leads into a definition, or has an escaped name
                return {**schema, **{key: tool.parameters[key] for key in _DEFINITIONS if key in tool.parameters}}
            needed.setdefault(keyword, {})[name] = definitions[name]
            pending.append(definitions[name])
    return {**schema, **needed}


def _has_length(value: str, schema: Mapping[str, Any]) -> bool:
    least, most = schema.get("minLength"), schema.get("maxLength")
    return not (
        (isinstance(least, int | float) and len(value) < least) or (isinstance(most, int | float) and len(value) > most)
    )


class ArgumentsAsJson:
    """Turns the arguments of a call, as they are read, into the text of a JSON object.

    Args:
        call: whose arguments they are.
        tool: that is called.
    """

    def __init__(self, call: ToolCallBegin, tool: Tool) -> None:
        self._index = call.index
        self._properties = described_properties(tool.parameters)
        self._kinds = SchemaKinds(tool.parameters)
        self._separator = "{"

    def add(self, key: str, text: str) -> ToolCallArguments:
        """The next argument, with the text of its value."""
        schema = self._properties.get(key)
        return self.add_json(key, json_text(text) if schema is None else as_json(text, self._kinds.with_text(schema)))

    def add_json(self, key: str, value: str) -> ToolCallArguments:
        """The next argument, with its value as JSON text."""
        piece = f"{self._separator}{json_text(key)}: {value}"
        self._separator = ", "
        return ToolCallArguments(self._index, piece)

    def end(self) -> ToolCallArguments:
        """There are no more."""
        return ToolCallArguments(self._index, "{}" if self._separator == "{" else "}")


def as_json(text: str, kinds: Sequence[Any]) -> str:
    """A value as JSON text: JSON stays as it is if it may be of one of these kinds that is not of strings; else a string.

    With white space around it, it is a string if there are kinds of strings: so no other value is written.

    Args:
        kinds: schemas, as those of `SchemaKinds`.
    """
    others = [kind for kind in kinds if not is_string(kind)]
    try:
        value = json.loads(text, parse_constant=int)  # which refuses NaN and Infinity: no JSON
    except (ValueError, RecursionError):
        return json_text(text)
    if len(others) == len(kinds):
        return text
    is_bare = text == text.strip(WHITESPACE)
    if is_bare and not isinstance(value, str) and any(_may_be(value, kind) for kind in others):
        return text
    return json_text(text)


def _may_be(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind, as far as that names types and values."""
    if not isinstance(kind, Mapping):
        return True
    values = named_values(kind)
    if isinstance(values, list):
        # Python's True equals 1.
        return any(value == each and widest_type(value) == widest_type(each) for each in values)
    return "type" not in kind or is_of_type(value, kind["type"])
