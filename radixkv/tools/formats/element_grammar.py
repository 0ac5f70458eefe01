"""Grammars of arguments that are written one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.tools.closed_schema import ANNOTATIONS
from radixkv.tools.definitions import Tool
from radixkv.tools.formats.argument_values import described_properties, value_before
from radixkv.tools.formats.element_syntax import KEY, Members, Nested, ValueFrames
from radixkv.tools.formats.schema_kinds import (
    ANY_STRING,
    SchemaKinds,
    allows_any_value,
    is_string,
    names_kind,
    names_members,
)
from radixkv.tools.grammar import GrammarWriter, escaped

_OF_VALUES = frozenset({"type", *ANNOTATIONS})
_OF_OBJECTS = _OF_VALUES | {"properties", "required", "additionalProperties"}
_OF_LISTS = _OF_VALUES | {"items"}
_OF_SOME_PROPERTIES = frozenset({"properties", "patternProperties"})
_ANY_SCALAR = ("number", "boolean", "null")


class ElementGrammar:
    """Writes the grammar of one tool's arguments.

    Args:
        syntax: how arguments are written.
        writer: collects the rules.
        tool: whose arguments they are.
    """

    def __init__(self, syntax: Members, writer: GrammarWriter, tool: Tool) -> None:
        self._syntax = syntax
        self._writer = writer
        self._tool = tool
        self._kinds = SchemaKinds(tool.parameters)

    def members(self, schema: Mapping[str, Any], rule: str, close: str) -> str:
        """An expression for the members of an object, and what follows the last one.

        Args:
            schema: of the object.
            rule: begins the names of its rules.
        """
        syntax, required = self._syntax, schema.get("required", ())
        parts = [
            (self._valued(f"{syntax.key_begin}{key}", syntax.values, part, f"{rule}_{index}", key), key in required)
            for index, (key, part) in enumerate(described_properties(schema).items())
        ]
        return in_order(self._writer, rule, parts, syntax.separator, close)

    def _valued(self, before: str, frames: ValueFrames, schema: Any, rule: str, key: str) -> str:
        """An expression for a value in its frame, of each kind that the schema allows."""
        parts = []
        for index, kind in enumerate(self._kinds_of(schema, frames)):
            frame = frames.strings if is_string(kind) else frames.others
            begin = self._writer.literal(f"{before}{frame.begin}")
            parts.append(f"{begin} {self._value(kind, f'{rule}_{index}', frame.end.replace(KEY, key))}")
        return " | ".join(parts)

    def _kinds_of(self, schema: Any, frames: ValueFrames) -> Sequence[Any]:
        if not self._syntax.splits_kinds:
            return self._kinds.text_apart(schema)
        return [each for kind in self._kinds.of(schema) for each in self._any_of(kind, frames)]

    def _any_of(self, kind: Any, frames: ValueFrames) -> Sequence[Any]:
        """The kinds of a value whose kind is not named.

        Where a value does not show it, that is text if any value is allowed; else JSON, as where the schema says more.
        """
        if names_kind(kind):
            return [kind]
        if not self._syntax.shows_kinds:
            return [ANY_STRING] if allows_any_value(kind) and not frames.distinguish_strings else [kind]
        if isinstance(kind, Mapping) and not allows_any_value(kind):
            if self._syntax.nested is None:
                return [kind]
            self._check(kind, ANNOTATIONS)
        return [{"type": each} for each in ("string", "object", "array", _ANY_SCALAR)]

    def _value(self, schema: Any, rule: str, end: str) -> str:
        writer, nested = self._writer, self._syntax.nested
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if nested is None or kind not in ("object", "array"):
            return value_before(writer, self._tool, schema, rule, end)
        if kind == "object" and names_members(schema):
            self._check(schema, _OF_OBJECTS)
            return f"{writer.literal(nested.object_open)} {self.members(schema, rule, f'{nested.object_close}{end}')}"
        if kind == "array" and isinstance(schema.get("items"), Mapping):
            self._check(schema, _OF_LISTS)
            item = writer.rule(f"{rule}_item", self._valued("", nested.items, schema["items"], f"{rule}_item", ""))
            return writer.repeated(nested.list_open, item, nested.separator, f"{nested.list_close}{end}")
        if not self._syntax.shows_kinds:
            return value_before(writer, self._tool, schema, rule, end)
        enforced = _OF_VALUES | {key for key in _OF_OBJECTS | _OF_LISTS if schema.get(key) in (True, [], {})}
        others = set(schema) - enforced
        # Beside properties that are described in another way, it is not about all.
        if kind == "object" and "additionalProperties" in others and others.isdisjoint(_OF_SOME_PROPERTIES):
            self._check(schema, enforced | {"additionalProperties"})
            return f"{self._dictionary(nested, schema['additionalProperties'], rule)} {writer.literal(end)}"
        self._check(schema, enforced)
        if not writer.has_rule("any_object"):
            self._add_any(nested)
        return f"{'any_object' if kind == 'object' else 'any_list'} {writer.literal(end)}"

    def _dictionary(self, nested: Nested, values: Any, rule: str) -> str:
        """An expression for an object that has any keys, and values of this schema; False: it has none."""
        writer, syntax = self._writer, self._syntax
        if values is False:
            return writer.literal(f"{nested.object_open}{nested.object_close}")
        value = self._valued("", syntax.values, values, f"{rule}_member", "")
        member = writer.rule(f"{rule}_member", f"{self._any_key()} ({value})")
        return writer.repeated(nested.object_open, member, syntax.separator, nested.object_close)

    def _add_any(self, nested: Nested) -> None:
        """Add the rules of objects and lists that are not described."""
        writer, syntax = self._writer, self._syntax
        other = f"(any_object | any_list | {writer.schema(self._tool, 'any_scalar', {'type': list(_ANY_SCALAR)})})"

        def valued(frames: ValueFrames) -> str:
            string = f"{writer.literal(frames.strings.begin)} {writer.text_before(frames.strings.end)}"
            return f"({string} | {writer.literal(frames.others.begin)} {other} {writer.literal(frames.others.end)})"

        member = writer.rule("any_member", f"{self._any_key()} {valued(syntax.values)}")
        item = writer.rule("any_item", valued(nested.items))
        writer.rule("any_object", writer.repeated(nested.object_open, member, syntax.separator, nested.object_close))
        writer.rule("any_list", writer.repeated(nested.list_open, item, nested.separator, nested.list_close))

    def _any_key(self) -> str:
        """An expression for any key, up to where its value begins."""
        ends = {text[0] for text in (*self._syntax.literals, '"') if text}
        return f"{self._writer.literal(self._syntax.key_begin)} /[^\\s{''.join(map(escaped, sorted(ends)))}]+/"

    def _check(self, schema: Mapping[str, Any], enforced: frozenset[str]) -> None:
        others = set(schema) - enforced
        if self._tool.strict and others:
            raise ValueError(
                f"tools: {self._tool.name}: {', '.join(sorted(others))} cannot be enforced in this model's form of calls"
            )


def in_order(writer: GrammarWriter, rule: str, members: Sequence[tuple[str, bool]], separator: str, close: str) -> str:
    """An expression for members in their order, and what follows the last one.

    Args:
        rule: begins the names of its rules.
        members: an expression for each, and whether it is required.
        separator: between two of them; it may be empty.
    """
    after = start = writer.literal(close)
    # From the last one: what may follow a member, and what may stand where there is none before.
    for index, (expression, is_required) in reversed(list(enumerate(members))):
        if not separator:
            after = start = f"({expression}) {after}" if is_required else f"({expression})? {after}"
            continue
        name = f"{rule}_{index}"
        member = writer.rule(name, expression)
        further = f"{writer.literal(separator)} {member}"
        start = f"{member} {after}" if is_required else f"{member} {after} | {start}"
        start = writer.rule(f"{name}_first", start)
        after = writer.rule(f"{name}_more", f"{further} {after}" if is_required else f"({further})? {after}")
    return start
