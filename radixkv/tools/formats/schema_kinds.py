"""Which kinds of values a schema allows, where strings, lists, objects and other values are each written in their own way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from radixkv.tools.closed_schema import ANNOTATIONS
from radixkv.tools.exclusive_schemas import exclude_each_other
from radixkv.tools.schema_values import is_of_type, named_values

# The schema of any text.
ANY_STRING: Mapping[str, Any] = MappingProxyType({"type": "string"})


class SchemaKinds:
    """Splits the schemas within a tool's parameters by kind.

    Args:
        parameters: the tool's, with the definitions of what is referred to.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._definitions = _definitions(parameters)
        self._of_references: dict[str, Sequence[Any]] = {}

    def of(self, schema: Any) -> Sequence[Any]:
        """Schemas of one type each, which together allow what a schema allows; one that names no type stays as it is."""
        if not isinstance(schema, Mapping):
            return [{} if schema is True else schema]
        keys = set(schema) - ANNOTATIONS
        if keys == {"$ref"} and (reference := str(schema["$ref"])) in self._definitions:
            # Once: each of two references may lead to two, and so on.
            if reference not in self._of_references:
                self._of_references[reference] = self.of(self._definitions[reference])
            return self._of_references[reference]
        for keyword in ("anyOf", "oneOf"):
            if keys == {keyword} and isinstance(schema[keyword], list) and schema[keyword]:
                alternatives = [self.of(each) for each in schema[keyword]]
                if keyword == "anyOf" or exclude_each_other(alternatives):
                    return [*{id(kind): kind for kinds in alternatives for kind in kinds}.values()]
        values = named_values(schema)
        if isinstance(schema.get("type"), list):
            kinds = [{**schema, "type": each} for each in schema["type"]]
            if not isinstance(values, list):
                return kinds
            by_kind = ((kind, [value for value in values if _is_named_by(kind["type"], value)]) for kind in kinds)
            return [{**kind, "enum": of_kind} for kind, of_kind in by_kind if of_kind]
        if isinstance(values, list) and schema.get("type", "string") == "string":
            strings = [value for value in values if isinstance(value, str)]
            others = [value for value in values if not isinstance(value, str)]
            if strings and others:
                return [{**schema, "enum": each} for each in ((strings,) if "type" in schema else (strings, others))]
        return [schema]

    def with_text(self, schema: Any) -> Sequence[Any]:
        """The kinds of a schema, where a value does not show whether it is a string; any value may then be text."""
        kinds = self.of(schema)
        return [ANY_STRING, *kinds] if any(map(allows_any_value, kinds)) else kinds

    def text_apart(self, schema: Any) -> Sequence[Any]:
        """Schemas of strings, which stand as they are, and one of all that is JSON; if there are no strings, the schema.

        A schema of any value is one of strings: all JSON is among the texts.
        """
        kinds = self.of(schema)
        if any(map(allows_any_value, kinds)):
            return [ANY_STRING]
        strings = [kind for kind in kinds if is_string(kind)]
        others = [kind for kind in kinds if not is_string(kind)]
        if not strings:
            return [schema]
        return [*strings, {"anyOf": others}] if len(others) > 1 else [*strings, *others]


def _definitions(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Schemas by the references to them, without those that have themselves within them."""
    schemas = {
        f"#/{key}/{name}": schema
        for key in ("$defs", "definitions")
        if isinstance(parameters.get(key), Mapping)
        for name, schema in parameters[key].items()
    }
    return {name: schema for name, schema in schemas.items() if not _leads_to(name, schema, schemas, set())}


def _is_named_by(name: Any, value: Any) -> bool:
    """Whether a value in a schema is of a type; that of whole numbers has 1.0 as well."""
    return is_of_type(int(value) if isinstance(value, float) and value.is_integer() else value, name)


def is_string(schema: Any) -> bool:
    """Whether a schema allows strings only."""
    if not isinstance(schema, Mapping):
        return False
    values = named_values(schema)
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return True
    return schema.get("type") == "string" and values is None


def allows_any_value(schema: Any) -> bool:
    """Whether a schema says nothing about values."""
    return isinstance(schema, Mapping) and set(schema) <= ANNOTATIONS


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
