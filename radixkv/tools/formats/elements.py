"""Arguments that are each written by themselves: a key, and a value between texts that delimit it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radixkv.tools.definitions import Tool
from radixkv.tools.formats.base import json_text
from radixkv.tools.formats.element_grammar import ElementGrammar
from radixkv.tools.formats.element_reading import read_arguments
from radixkv.tools.formats.element_syntax import KEY, Members, ValueFrames
from radixkv.tools.formats.notation import ArgumentNotation
from radixkv.tools.grammar import GrammarWriter
from radixkv.tools.pieces import ToolCallBegin
from radixkv.tools.source import AnswerSource, Parsing


@dataclass(frozen=True)
class ElementNotation(ArgumentNotation):
    """A key and a value for each argument.

    Attributes:
        members: how they are written.
        close: after the last argument.
    """

    members: Members
    close: str

    @property
    def literals(self) -> tuple[str, ...]:
        return (self.close, *self.members.literals)

    def write(self, arguments: Mapping[str, Any]) -> str:
        return write_members(self.members, arguments) + self.close

    def expression(self, writer: GrammarWriter, tool: Tool, rule: str) -> str:
        return ElementGrammar(self.members, writer, tool).members(tool.parameters, rule, self.close)

    def read(self, source: AnswerSource, begun: ToolCallBegin) -> Parsing[None]:
        return read_arguments(source, begun, self.members, self.close)


def write_members(members: Members, values: Mapping[str, Any]) -> str:
    """Keys with their values."""
    return members.separator.join(
        f"{members.key_begin}{key}{_write_value(members, members.values, value, key)}" for key, value in values.items()
    )


def _write_value(members: Members, frames: ValueFrames, value: Any, key: str) -> str:
    frame, nested = frames.others, members.nested
    if isinstance(value, str):
        frame, text = frames.strings, value
    elif nested is not None and isinstance(value, Mapping):
        text = f"{nested.object_open}{write_members(members, value)}{nested.object_close}"
    elif nested is not None and isinstance(value, list):
        items = nested.separator.join(_write_value(members, nested.items, each, key) for each in value)
        text = f"{nested.list_open}{items}{nested.list_close}"
    else:
        text = json_text(value)
    return f"{frame.begin}{text}{frame.end.replace(KEY, key)}"
