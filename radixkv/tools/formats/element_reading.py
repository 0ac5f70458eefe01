"""Reads arguments that are written one by one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from radixkv.tools.formats.argument_values import ArgumentsAsJson, as_json, described_properties, is_string
from radixkv.tools.formats.base import json_text
from radixkv.tools.formats.element_syntax import KEY, Members, ValueFrame, ValueFrames
from radixkv.tools.json_calls import json_text_before, json_value_text
from radixkv.tools.pieces import ToolCallBegin
from radixkv.tools.source import AnswerSource, Parsing, collect_until, expect, follows, starts_with

# Of a value that is not described.
_ANY: Mapping[str, Any] = MappingProxyType({})


def read_arguments(source: AnswerSource, begun: ToolCallBegin, syntax: Members, close: str) -> Parsing[None]:
    """Read the arguments of a call, up to ``close``, which follows the last one.

    Raises:
        MalformedCallError: they are incomplete.
    """
    tool = source.tools[begun.name]
    arguments, schemas = ArgumentsAsJson(begun, tool), described_properties(tool.parameters)
    reader = _Reader(source, syntax)
    separator = ""
    while not (yield from starts_with(source, close)):
        yield from expect(source, separator)
        key, value = yield from reader.member(schemas)
        yield arguments.add_json(key, value)
        separator = syntax.separator
    yield arguments.end()


class _Reader:
    """Reads members, and values as JSON text."""

    def __init__(self, source: AnswerSource, syntax: Members) -> None:
        self._source = source
        self._syntax = syntax

    def member(self, schemas: Mapping[str, Any]) -> Parsing[tuple[str, str]]:
        """A key and its value.

        Args:
            schemas: of values, by their keys.
        """
        yield from expect(self._source, self._syntax.key_begin)
        frames = self._syntax.values
        shorter, longer = sorted((frames.others, frames.strings), key=lambda frame: len(frame.begin))
        if longer.begin.startswith(shorter.begin):
            key, _ = yield from collect_until(self._source, [shorter.begin])
            is_longer = yield from starts_with(self._source, longer.begin.removeprefix(shorter.begin))
            frame = longer if is_longer else shorter
        else:
            key, begin = yield from collect_until(self._source, [shorter.begin, longer.begin])
            frame = longer if begin == longer.begin else shorter
        schema = schemas.get(key, _ANY)
        return key, (yield from self._value(self._frame_of(frames, frame, schema), frames, schema, key))

    def _item(self, frames: ValueFrames, schema: Any) -> Parsing[str]:
        longer, shorter = sorted((frames.strings, frames.others), key=lambda frame: -len(frame.begin))
        if (yield from starts_with(self._source, longer.begin)):
            frame = longer
        else:
            yield from expect(self._source, shorter.begin)
            frame = shorter
        return (yield from self._value(self._frame_of(frames, frame, schema), frames, schema, ""))

    def _frame_of(self, frames: ValueFrames, found: ValueFrame, schema: Any) -> ValueFrame:
        """The frame of a value, which shows in how it begins, or in the schema."""
        if frames.tell_strings:
            return found
        return frames.strings if is_string(schema) else frames.others

    def _value(self, frame: ValueFrame, frames: ValueFrames, schema: Any, key: str) -> Parsing[str]:
        """A value, after the beginning of its frame, and the end of that."""
        source, nested = self._source, self._syntax.nested
        end = frame.end.replace(KEY, key)
        if frame is frames.strings:
            text, _ = yield from collect_until(source, [end])
            return json_text(text)
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if nested is not None:
            if kind != "object" and (yield from self._opens(nested.list_open, nested.items.others.begin)):
                return (yield from self._list(schema, end))
            if kind != "array" and (yield from self._opens(nested.object_open, self._syntax.key_begin)):
                return (yield from self._object(schema, end))
            if kind in ("object", "array") and (yield from starts_with(source, end)):
                return "{}" if kind == "object" else "[]"
        if not end:
            return as_json((yield from json_value_text(source)), _ANY)
        return as_json((yield from json_text_before(source, end)), schema)

    def _opens(self, opening: str, first: str) -> Parsing[bool]:
        """Whether a list or an object begins; ``opening`` is then taken."""
        return (yield from starts_with(self._source, opening) if opening else follows(self._source, first))

    def _object(self, schema: Any, end: str) -> Parsing[str]:
        assert self._syntax.nested is not None
        described = isinstance(schema, Mapping) and isinstance(schema.get("properties"), Mapping)
        schemas = described_properties(schema) if described else _ANY
        members: list[str] = []
        while not (yield from starts_with(self._source, f"{self._syntax.nested.object_close}{end}")):
            yield from expect(self._source, self._syntax.separator if members else "")
            key, value = yield from self.member(schemas)
            members.append(f"{json_text(key)}: {value}")
        return f"{{{', '.join(members)}}}"

    def _list(self, schema: Any, end: str) -> Parsing[str]:
        nested = self._syntax.nested
        assert nested is not None
        item_schema = schema.get("items", _ANY) if isinstance(schema, Mapping) else _ANY
        items: list[str] = []
        while not (yield from starts_with(self._source, f"{nested.list_close}{end}")):
            yield from expect(self._source, nested.separator if items else "")
            items.append((yield from self._item(nested.items, item_schema)))
        return f"[{', '.join(items)}]"
