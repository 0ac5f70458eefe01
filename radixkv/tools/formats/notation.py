"""How the arguments of a call are written: what derived forms of calls can have in the place of arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from radixkv.tools.definitions import Tool
from radixkv.tools.formats.base import json_text
from radixkv.tools.grammar import GrammarWriter
from radixkv.tools.json_calls import json_arguments
from radixkv.tools.pieces import ToolCallBegin
from radixkv.tools.source import AnswerSource, Parsing


class ArgumentNotation(ABC):
    """How all arguments of a call are written."""

    @property
    def literals(self) -> tuple[str, ...]:
        """The texts that are in it whatever the arguments are."""
        return ()

    @abstractmethod
    def write(self, arguments: Mapping[str, Any]) -> str:
        """The arguments as the model writes them."""

    @abstractmethod
    def expression(self, writer: GrammarWriter, tool: Tool, rule: str) -> str:
        """A grammar expression for arguments that the tool takes.

        Args:
            rule: begins the names of its rules and schemas.

        Raises:
            ValueError: the tool is strict and its schema cannot be enforced in this notation.
        """

    @abstractmethod
    def read(self, source: AnswerSource, begun: ToolCallBegin) -> Parsing[None]:
        """Read the arguments.

        Raises:
            MalformedCallError: they are incomplete.
        """


class JsonNotation(ArgumentNotation):
    """One JSON object."""

    def write(self, arguments: Mapping[str, Any]) -> str:
        return json_text(arguments)

    def expression(self, writer: GrammarWriter, tool: Tool, rule: str) -> str:
        return writer.schema(tool, f"{rule}_arguments", tool.parameters)

    def read(self, source: AnswerSource, begun: ToolCallBegin) -> Parsing[None]:
        return json_arguments(source, begun)
