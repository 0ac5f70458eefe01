"""Arguments that are each written by themselves: a key, and a value that is plain text or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radixkv.tools.definitions import Tool
from radixkv.tools.formats.argument_values import ArgumentsAsJson, described_properties, is_string, value_before
from radixkv.tools.formats.base import json_text
from radixkv.tools.formats.notation import ArgumentNotation
from radixkv.tools.grammar import GrammarWriter
from radixkv.tools.json_calls import json_text_before
from radixkv.tools.pieces import ToolCallBegin
from radixkv.tools.source import AnswerSource, Parsing, collect_until, expect, starts_with

# Stands for the key, where it is repeated after the value.
KEY = "\ue003"


@dataclass(frozen=True)
class ValueFrame:
    """What stands around values of one kind.

    Attributes:
        begin: between the key and the value.
        end: after the value. It may have `KEY` in it.
    """

    begin: str
    end: str


@dataclass(frozen=True)
class ElementNotation(ArgumentNotation):
    """A key and a value for each argument.

    Attributes:
        key_begin: before each key; it may be empty.
        strings: around values that are strings, which stand as they are.
        others: around all other values, which are JSON.
        separator: between two arguments; it may be empty.
        close: after the arguments.
    """

    key_begin: str
    strings: ValueFrame
    others: ValueFrame
    separator: str
    close: str

    @property
    def literals(self) -> tuple[str, ...]:  # type: ignore[override]
        frames = (self.strings, self.others)
        texts = (each for frame in frames for each in (frame.begin, *frame.end.split(KEY)))
        return (self.key_begin, self.separator, self.close, *texts)

    def write(self, arguments: Mapping[str, Any]) -> str:
        return self.separator.join(self._element(key, value) for key, value in arguments.items()) + self.close

    def _element(self, key: str, value: Any) -> str:
        frame, text = (self.strings, value) if isinstance(value, str) else (self.others, json_text(value))
        return f"{self.key_begin}{key}{frame.begin}{text}{frame.end.replace(KEY, key)}"

    def expression(self, writer: GrammarWriter, tool: Tool, rule: str) -> str:
        required = tool.parameters.get("required", ())
        separator = writer.literal(self.separator)
        # From the last one: what may follow an argument, and what may follow where there is none yet.
        after, start = writer.literal(self.close), writer.literal(self.close)
        for index, (key, schema) in reversed(list(enumerate(described_properties(tool).items()))):
            element = writer.rule(
                f"{rule}_argument_{index}", self._expression(writer, tool, f"{rule}_{index}", key, schema)
            )
            is_required = key in required
            start = writer.rule(f"{rule}_from_{index}", f"{element} {after}" + ("" if is_required else f" | {start}"))
            further = f"{separator} {element}" if is_required else f"({separator} {element})?"
            after = writer.rule(f"{rule}_after_{index}", f"{further} {after}")
        return start

    def _expression(self, writer: GrammarWriter, tool: Tool, rule: str, key: str, schema: Any) -> str:
        frame = self.strings if is_string(schema) else self.others
        begin = writer.literal(f"{self.key_begin}{key}{frame.begin}")
        return f"{begin} {value_before(writer, tool, schema, rule, frame.end.replace(KEY, key))}"

    def read(self, source: AnswerSource, begun: ToolCallBegin) -> Parsing[None]:
        tool = source.tools[begun.name]
        arguments = ArgumentsAsJson(begun, tool)
        schemas = described_properties(tool)
        before = self.key_begin
        while not (yield from starts_with(source, self.close)):
            yield from expect(source, before)
            key, is_plain = yield from self._key(source, schemas)
            if is_plain:
                text, _ = yield from collect_until(source, [self.strings.end.replace(KEY, key)])
                yield arguments.add_json(key, json_text(text))
            else:
                text = yield from json_text_before(source, self.others.end.replace(KEY, key))
                yield arguments.add(key, text)
            before = f"{self.separator}{self.key_begin}"
        yield arguments.end()

    def _key(self, source: AnswerSource, schemas: Mapping[str, Any]) -> Parsing[tuple[str, bool]]:
        """Take a key, and what follows it; whether a string follows."""
        begins = {self.strings.begin, self.others.begin}
        shorter, longer = sorted(begins, key=len) if len(begins) > 1 else (self.others.begin, self.others.begin)
        if longer.startswith(shorter):
            key, _ = yield from collect_until(source, [shorter])
            begin = longer if (yield from starts_with(source, longer[len(shorter) :])) else shorter
        else:
            key, begin = yield from collect_until(source, [shorter, longer])
        if len(begins) == 1:
            return key, is_string(schemas.get(key, {"type": "string"}))
        return key, begin == self.strings.begin
