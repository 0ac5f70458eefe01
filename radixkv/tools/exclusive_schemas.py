"""Whether alternatives exclude each other: ``oneOf`` is then equivalent to ``anyOf``."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from radixkv.tools.schema_values import named_values, widest_type

# Names of properties that are tried as the one in which objects differ.
_MAX_NAMES = 8


def exclude_each_other(groups: Sequence[Sequence[Any]]) -> bool:
    """Whether no value can be of two alternatives, by types, by values that are named, or by a property of objects.

    Args:
        groups: for each alternative, schemas of which each of its values is at least of one, with neither references nor
            alternatives at their top; none: these are not known.
    """
    types: list[str] = []
    values: list[tuple[str, Hashable]] = []
    objects: list[Sequence[Any]] = []
    for group in groups:
        parts = [_types_and_values(schema) for schema in group]
        if not parts or not all(any(part) for part in parts):
            return False
        own_types = set[str]().union(*(types for types, _ in parts))
        own_values = set[tuple[str, Hashable]]().union(*(values for _, values in parts))
        if "object" in own_types:
            objects.append([schema for schema, (types, _) in zip(group, parts, strict=True) if "object" in types])
        types += own_types - {"object"}
        values += (value for value in own_values if value[0] not in own_types)
    if (
        len(set(types)) < len(types)
        or len(set(values)) < len(values)
        or not {kind for kind, _ in values}.isdisjoint(types)
    ):
        return False
    return len(objects) < 2 or _differ_in_one_property(objects)


def differ_in(groups: Sequence[Sequence[Any]], name: str) -> bool:
    """Whether all schemas are of objects, in which a property has values that it has in no other group."""
    seen: set[tuple[str, Hashable]] = set()
    for group in groups:
        values = [_values_of_property(schema, name) for schema in group]
        known = set(itertools.chain(*values))
        if not values or not all(values) or not seen.isdisjoint(known):
            return False
        seen |= known
    return True


def _differ_in_one_property(objects: Sequence[Sequence[Any]]) -> bool:
    properties = objects[0][0].get("properties")
    names = itertools.islice(properties if isinstance(properties, Mapping) else (), _MAX_NAMES)
    # Without the property, a value is of the one group at most that does not require it.
    return any(
        differ_in(objects, name) and sum(not all(_requires(each, name) for each in group) for group in objects) <= 1
        for name in names
    )


def _requires(schema: Mapping[str, Any], name: str) -> bool:
    required = schema.get("required")
    return isinstance(required, list) and name in required


def _values_of_property(schema: Any, name: str) -> set[tuple[str, Hashable]]:
    """The only values that a property of an object may have, each with its type; none if that is not known."""
    match schema:
        case {"type": "object", "properties": Mapping() as properties}:
            types, values = _types_and_values(properties.get(name))
            return set() if types else values
    return set()


def _types_and_values(schema: Any) -> tuple[set[str], set[tuple[str, Hashable]]]:
    """The types of a schema's values, and beside them the values that it names, each with its type.

    Whole numbers are numbers, because they may be of both types. Nothing: that is not known.
    """
    if not isinstance(schema, Mapping):
        return set(), set()
    given, named = schema.get("type"), named_values(schema)
    names = given if isinstance(given, list) else [given]
    types = {"number" if name == "integer" else name for name in names if isinstance(name, str)}
    if named is None:
        return types, set()
    typed = [(widest_type(value), value) for value in named] if isinstance(named, list) else []
    if types:
        typed = [(kind, value) for kind, value in typed if kind in types]
    if any(kind is None for kind, _ in typed):
        return set(), set()
    types = {kind for kind, value in typed if kind is not None and not isinstance(value, Hashable)}
    values = {(kind, value) for kind, value in typed if kind is not None and isinstance(value, Hashable)}
    return types, values
