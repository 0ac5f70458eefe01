"""Alternatives of which exactly one must hold: where they exclude each other, ``oneOf`` is equivalent to ``anyOf``.

The compiler finds that out itself where all are written in place, and refuses others. Pydantic and zod write those that have
names as references.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from radixkv.sampling.json_schema.references import References

# A union is looked through once for each place that names it; one with more parts stays as it is.
_MAX_PARTS = 256
# Names that are tried as the discriminator where none is named.
_MAX_NAMES = 8


def replace_one_of(part: dict[str, Any], references: References) -> None:
    """Make ``oneOf`` an ``anyOf``, in place, if the alternatives differ in type, or objects in one property.

    A discriminator that is named becomes required in each of them, also where something else refers to them: where it has a
    default value, pydantic leaves that out, and needs it.

    Args:
        part: a schema, perhaps with ``oneOf`` and ``discriminator``.
        references: of the schema that it is a part of.
    """
    alternatives, discriminator = part.get("oneOf"), part.get("discriminator")
    if not isinstance(alternatives, list) or "anyOf" in part:
        return
    name = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
    groups = [_objects(alternative, references) for alternative in alternatives]
    if isinstance(name, str) and _differ(groups, name):
        for each in itertools.chain(*groups):
            required = each.setdefault("required", [])
            if isinstance(required, list) and name not in required:
                required.append(name)
    elif not _exclude_each_other(groups):
        return
    # In the place of the other: an answer's properties come in the order of the keywords.
    renamed = [("anyOf" if keyword == "oneOf" else keyword, value) for keyword, value in part.items()]
    part.clear()
    part.update(renamed)


def _differ(groups: list[list[Any]], name: str) -> bool:
    """Whether all are objects, in which a property has values that it has in no other group."""
    seen: set[str | int] = set()
    for group in groups:
        values = [_values(each, name) for each in group]
        known = set(itertools.chain(*values))
        if not values or not all(values) or not seen.isdisjoint(known):
            return False
        seen |= known
    return True


def _exclude_each_other(groups: list[list[Any]]) -> bool:
    """Whether no value can be of two groups: their types differ, or they are objects that differ in a property."""
    objects: list[list[Any]] = []
    seen: set[str] = set()
    for group in groups:
        types = {_type(each) for each in group}
        if not types or None in types or not seen.isdisjoint(types):
            return False
        if types == {"object"}:
            objects.append(group)
        else:
            seen |= {str(each) for each in types}
    if objects and "object" in seen:
        return False
    if len(objects) < 2:
        return True
    first = objects[0][0].get("properties")
    names = itertools.islice(first if isinstance(first, Mapping) else (), _MAX_NAMES)
    # Without the property, a value is of the one group at most that does not require it.
    return any(
        _differ(objects, name) and sum(not all(_requires(each, name) for each in group) for group in objects) <= 1
        for name in names
    )


def _requires(schema: dict[str, Any], name: str) -> bool:
    required = schema.get("required")
    return isinstance(required, list) and name in required


def _type(schema: Any) -> str | None:
    """The only type of a schema's values, whole numbers included in others; None: that is not known."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    return "number" if kind == "integer" else kind if isinstance(kind, str) else None


def _objects(alternative: Any, references: References) -> list[Any]:
    """The schemas, of objects if all is well, that references and alternatives within an alternative lead to.

    None if they are too many.
    """
    found: list[Any] = []
    pending, seen = [alternative], set()
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if len(seen) > _MAX_PARTS:
            return []
        nested = part.get("oneOf", part.get("anyOf")) if isinstance(part, dict) else None
        if isinstance(part, dict) and "$ref" in part:
            pending.append(references.target_of(part["$ref"]))
        elif isinstance(nested, list):
            pending += nested[: _MAX_PARTS + 1]
        else:
            found.append(part)
    return found


def _values(schema: Any, name: str) -> list[str | int]:
    """The only values that a property of an object may have; none if that is not known."""
    match schema:
        case {"type": "object", "properties": dict() as properties}:
            match properties.get(name):
                case {"const": str() | int() as value}:
                    return [value]
                case {"enum": [*values]} if all(isinstance(value, str | int) for value in values):
                    return values
    return []
