"""The grammar of values in Python's syntax: JSON, or what Python writes in another way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from radixkv.tools.closed_schema import ANNOTATIONS
from radixkv.tools.definitions import Tool
from radixkv.tools.formats.argument_values import with_definitions
from radixkv.tools.formats.schema_kinds import SchemaKinds
from radixkv.tools.grammar import GrammarWriter
from radixkv.tools.schema_values import named_values

WORDS: Mapping[Any, str] = MappingProxyType({True: "True", False: "False", None: "None"})
# A string between single quotes; between double quotes it is JSON.
_STRING = r"""/'([^'\\\x00-\x1f]|\\['"\\bfnrt])*'/"""
_OF_VALUES = frozenset({"type", "enum", "const", *ANNOTATIONS})
_OF_LISTS = frozenset({"type", "items", *ANNOTATIONS})
_ESCAPED = str.maketrans({"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"})


class PythonValues:
    """Writes the grammar of one tool's values. Objects within them are JSON.

    Args:
        writer: collects the rules.
        tool: whose arguments they are.
    """

    def __init__(self, writer: GrammarWriter, tool: Tool) -> None:
        self._writer = writer
        self._tool = tool
        self._kinds = SchemaKinds(tool.parameters)

    def expression(self, schema: Any, rule: str) -> str:
        """An expression for a value.

        Args:
            rule: begins the names of its rules and schemas.
        """
        spellings = [self._writer.schema(self._tool, rule, with_definitions(schema, self._tool))]
        for index, kind in enumerate(self._kinds.of(schema)):
            spellings += self._unlike_json(kind, f"{rule}_{index}")
        return " | ".join(spellings)

    def _unlike_json(self, kind: Any, rule: str) -> Sequence[str]:
        """Expressions for what Python writes in another way than JSON; where the schema says more, none."""
        writer = self._writer
        if not isinstance(kind, Mapping):
            return []
        items = kind.get("items")
        if kind.get("type") == "array" and set(kind) <= _OF_LISTS and isinstance(items, Mapping):
            item = writer.rule(f"{rule}_item", self.expression(items, f"{rule}_item"))
            return [writer.repeated("[", item, ", ", "]")]
        if not set(kind) <= _OF_VALUES:
            return []
        values = named_values(kind)
        if isinstance(values, list):
            texts = [_text_of(value) for value in values if isinstance(value, str | bool | None)]
            return list(map(writer.literal, texts))
        by_type = {
            "string": [writer.rule("SINGLE_QUOTED", _STRING)],
            "boolean": ['"True"', '"False"'],
            "null": ['"None"'],
        }
        if "type" not in kind:
            return [text for texts in by_type.values() for text in texts]
        return by_type.get(str(kind["type"]), [])


def _text_of(value: str | bool | None) -> str:
    return f"'{value.translate(_ESCAPED)}'" if isinstance(value, str) else WORDS[value]
