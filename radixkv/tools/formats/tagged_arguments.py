"""Calls with tags around each argument, in which strings stand as they are and all other values as JSON.

What the forms of Qwen3-Coder and GLM have in common.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from radixkv.tools.definitions import Tool
from radixkv.tools.formats.argument_values import described_properties, value_before
from radixkv.tools.formats.base import CallFormat, json_text, marked_calls, with_arguments_as_objects
from radixkv.tools.formats.schema_kinds import SchemaKinds
from radixkv.tools.grammar import GrammarWriter
from radixkv.tools.source import AnswerSource, Parsing


class TaggedArgumentsFormat(CallFormat):
    """Tags around each call, and within them around each argument.

    Attributes:
        call_end: ends each call.
        value_end: ends the value of each argument.
    """

    call_begin = "<tool_call>"
    call_end = "</tool_call>"
    value_end: str

    def as_template_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        return with_arguments_as_objects(message)

    def parse(self, source: AnswerSource) -> Parsing[None]:
        return marked_calls(source, self.call_begin, self.read_call)

    @abstractmethod
    def read_call(self, source: AnswerSource) -> Parsing[None]:
        """Read a call, after ``call_begin``."""

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        texts = {key: value if isinstance(value, str) else json_text(value) for key, value in arguments.items()}
        return f"{self.call_begin}{self.write_body(name, texts)}{self.call_end}"

    @abstractmethod
    def write_body(self, name: str, values: Mapping[str, str]) -> str:
        """What stands between ``call_begin`` and ``call_end`` for these texts of arguments."""

    def call_body(self, writer: GrammarWriter, tool: Tool, rule: str) -> str:
        required = tool.parameters.get("required", ())
        parts, kinds = [self.name_expression(writer, tool.name)], SchemaKinds(tool.parameters)
        for index, (key, schema) in enumerate(described_properties(tool.parameters).items()):
            values = (
                value_before(writer, tool, kind, f"{rule}_{index}_{number}", self.value_end)
                for number, kind in enumerate(kinds.text_apart(schema))
            )
            part = self.argument_expression(writer, key, f"({' | '.join(values)})")
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
