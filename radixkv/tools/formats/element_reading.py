"""Reads arguments that are written one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from radixkv.tools.formats.argument_values import ArgumentsAsJson, as_json, described_properties
from radixkv.tools.formats.base import json_text
from radixkv.tools.formats.element_syntax import KEY, Members, ValueFrame, ValueFrames
from radixkv.tools.formats.schema_kinds import SchemaKinds, is_string, names_members
from radixkv.tools.json_calls import json_text_before, json_value_text
from radixkv.tools.pieces import ToolCallBegin
from radixkv.tools.source import (
    AnswerSource,
    MalformedCallError,
    Parsing,
    accept,
    collect_until,
    expect,
    follows,
    skip_whitespace,
)

# Of a value that is not described.
_ANY: Mapping[str, Any] = MappingProxyType({})
# Of lists and objects, which are read by recursion.
_MAX_DEPTH = 64
# Values that may be written as nothing, the likeliest first.
_EMPTY = MappingProxyType({"string": '""', "array": "[]", "object": "{}"})


def read_arguments(source: AnswerSource, begun: ToolCallBegin, syntax: Members, close: str) -> Parsing[None]:
    """Read the arguments of a call, up to ``close``, which follows the last one.

    Raises:
        MalformedCallError: they are incomplete.
    """
    tool = source.tools[begun.name]
    arguments, schemas = ArgumentsAsJson(begun, tool), described_properties(tool.parameters)
    reader = _Reader(source, syntax, SchemaKinds(tool.parameters))
    separator = ""
    while not (yield from accept(source, close)):
        yield from expect(source, separator)
        key, value = yield from reader.member(schemas)
        yield arguments.add_json(key, value)
        separator = syntax.separator
    yield arguments.end()


class _Reader:
    """Reads members, and values as JSON text."""

    def __init__(self, source: AnswerSource, syntax: Members, kinds: SchemaKinds) -> None:
        self._source = source
        self._syntax = syntax
        self._kinds = kinds
        self._depth = 0  # of the lists and objects that are being read

    def member(self, schemas: Mapping[str, Any]) -> Parsing[tuple[str, str]]:
        """A key and its value.

        Args:
            schemas: of values, by their keys.
        """
        yield from expect(self._source, self._syntax.key_begin)
        frames = self._syntax.values
        longer, shorter = frames.longest_first
        if longer.begin.startswith(shorter.begin):
            key, _ = yield from collect_until(self._source, [shorter.begin])
            is_longer = yield from accept(self._source, longer.begin.removeprefix(shorter.begin))
            frame = longer if is_longer else shorter
        else:
            key, begin = yield from collect_until(self._source, [shorter.begin, longer.begin])
            frame = longer if begin == longer.begin else shorter
        schema = schemas.get(key, _ANY)
        return key, (yield from self._value(frame, frames, schema, key))

    def _item(self, frames: ValueFrames, schema: Any) -> Parsing[str]:
        longer, shorter = frames.longest_first
        if (yield from accept(self._source, longer.begin)):
            frame = longer
        else:
            yield from expect(self._source, shorter.begin)
            frame = shorter
        return (yield from self._value(frame, frames, schema, ""))

    def _value(self, found: ValueFrame, frames: ValueFrames, schema: Any, key: str) -> Parsing[str]:
        """A value, after the beginning of the frame that was found, and the end of its frame."""
        source, nested = self._source, self._syntax.nested
        kinds = (self._kinds.of if frames.distinguish_strings else self._kinds.with_text)(schema)
        # Where frames begin alike, the schema decides whether the value is a string.
        is_text = found is frames.strings if frames.distinguish_strings else all(map(is_string, kinds))
        end = (frames.strings if is_text else frames.others).end.replace(KEY, key)
        if is_text:
            text, _ = yield from collect_until(source, [end])
            return json_text(text)
        if nested is None:
            return (yield from self._text_or_json(frames, kinds, end))
        types = [kind.get("type") if isinstance(kind, Mapping) else None for kind in kinds]
        if end and (yield from accept(source, end)):
            return next((text for kind, text in _EMPTY.items() if kind in types), json_text(""))
        if (None in types or "array" in types) and (
            yield from self._opens(nested.list_open, nested.items.others.begin)
        ):
            return (yield from self._within(self._list(_items_of(kinds), end)))
        if (None in types or "object" in types) and (
            yield from self._opens(nested.object_open, self._syntax.key_begin)
        ):
            return (yield from self._within(self._object(_members_of(kinds), end)))
        if not end:
            yield from skip_whitespace(source)
            return as_json((yield from json_value_text(source)), [_ANY])
        return (yield from self._text_or_json(frames, kinds, end))

    def _text_or_json(self, frames: ValueFrames, kinds: Sequence[Any], end: str) -> Parsing[str]:
        """A value in the frame of those that are not strings; it may be one where both frames begin alike."""
        if frames.distinguish_strings:
            kinds = [kind for kind in kinds if not is_string(kind)] or kinds
        elif any(map(is_string, kinds)):
            text, _ = yield from collect_until(self._source, [end])
            return as_json(text, kinds)
        return as_json((yield from json_text_before(self._source, end)), kinds)

    def _within(self, value: Parsing[str]) -> Parsing[str]:
        """A list or an object."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise MalformedCallError
        text = yield from value
        self._depth -= 1
        return text

    def _opens(self, opening: str, first: str) -> Parsing[bool]:
        """Whether a list or an object begins; ``opening`` is then taken."""
        return (yield from accept(self._source, opening) if opening else follows(self._source, first))

    def _object(self, schemas: Mapping[str, Any], end: str) -> Parsing[str]:
        assert self._syntax.nested is not None
        members: list[str] = []
        while not (yield from accept(self._source, f"{self._syntax.nested.object_close}{end}")):
            yield from expect(self._source, self._syntax.separator if members else "")
            key, value = yield from self.member(schemas)
            members.append(f"{json_text(key)}: {value}")
        return f"{{{', '.join(members)}}}"

    def _list(self, item_schema: Any, end: str) -> Parsing[str]:
        nested = self._syntax.nested
        assert nested is not None
        items: list[str] = []
        while not (yield from accept(self._source, f"{nested.list_close}{end}")):
            yield from expect(self._source, nested.separator if items else "")
            items.append((yield from self._item(nested.items, item_schema)))
        return f"[{', '.join(items)}]"


def _members_of(kinds: Sequence[Any]) -> Mapping[str, Any]:
    """The schemas of the members of objects, by their keys: of one that several kinds have, any of theirs."""
    schemas: dict[str, list[Any]] = {}
    for kind in _of_type("object", kinds):
        for key, schema in described_properties(kind).items() if names_members(kind) else ():
            schemas.setdefault(key, []).append(schema)
    return {key: _any_of(each) for key, each in schemas.items()}


def _items_of(kinds: Sequence[Any]) -> Any:
    """The schema of the items of lists."""
    return _any_of([kind.get("items", _ANY) for kind in _of_type("array", kinds)] or [_ANY])


def _any_of(schemas: Sequence[Any]) -> Any:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _of_type(name: str, kinds: Sequence[Any]) -> Sequence[Mapping[str, Any]]:
    return [kind for kind in kinds if isinstance(kind, Mapping) and kind.get("type") == name]
