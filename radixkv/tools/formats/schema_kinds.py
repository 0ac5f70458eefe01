"""Which kinds of values a schema allows, where strings, lists, objects and other values are each written in their own way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.tools.grammar import ANNOTATIONS


class SchemaKinds:
    """Splits the schemas within a tool's parameters by kind.

    Args:
        parameters: the tool's, with the definitions of what is referred to.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._definitions = _definitions(parameters)

    def of(self, schema: Any) -> Sequence[Any]:
        """Schemas of one type each, which together allow what a schema allows; one that names no type stays as it is."""
        if not isinstance(schema, Mapping):
            return [schema]
        keys = set(schema) - ANNOTATIONS
        if keys == {"$ref"} and str(schema["$ref"]) in self._definitions:
            return self.of(self._definitions[schema["$ref"]])
        if keys == {"anyOf"} and isinstance(schema["anyOf"], list):
            return [kind for each in schema["anyOf"] for kind in self.of(each)]
        if isinstance(schema.get("type"), list):
            return [{**schema, "type": each} for each in schema["type"]]
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and "type" not in schema:
            strings = [value for value in values if isinstance(value, str)]
            others = [value for value in values if not isinstance(value, str)]
            return [{"enum": each} for each in (strings, others) if each]
        return [schema]


def _definitions(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Schemas by the references to them, without those that have themselves within them."""
    schemas = {
        f"#/{key}/{name}": schema
        for key in ("$defs", "definitions")
        if isinstance(parameters.get(key), Mapping)
        for name, schema in parameters[key].items()
    }
    return {name: schema for name, schema in schemas.items() if not _leads_to(name, schema, schemas, set())}


def names_kind(schema: Any) -> bool:
    """Whether a schema names a type, or all its values."""
    return isinstance(schema, Mapping) and not schema.keys().isdisjoint(("type", "enum", "const"))


def names_members(schema: Mapping[str, Any]) -> bool:
    """Whether an object's schema names its members."""
    properties = schema.get("properties")
    return bool(isinstance(properties, Mapping) and properties and isinstance(schema.get("required", []), list))


def _leads_to(name: str, part: Any, schemas: Mapping[str, Any], seen: set[str]) -> bool:
    """Whether references in a part of a schema lead to the schema of this name."""
    if isinstance(part, list):
        return any(_leads_to(name, each, schemas, seen) for each in part)
    if not isinstance(part, Mapping):
        return False
    target = part.get("$ref")
    if isinstance(target, str) and target not in seen:
        seen.add(target)
        if target == name or _leads_to(name, schemas.get(target), schemas, seen):
            return True
    return any(_leads_to(name, each, schemas, seen) for each in part.values())
