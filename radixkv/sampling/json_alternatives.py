"""Alternatives of which exactly one must hold: where they exclude each other, ``oneOf`` says what ``anyOf`` says.

The compiler finds that out itself where all are written in place, and refuses others. Pydantic writes those of a
discriminated union as references.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from radixkv.sampling.json_references import References

# A union is looked through once for each place that names it; of one with more parts, what excludes what is not found out.
_MAX_PARTS = 256


def replace_one_of(part: dict[str, Any], references: References) -> None:
    """Make ``oneOf`` an ``anyOf``, in place, if the alternatives are objects with different values of a discriminator.

    The discriminator becomes required in each of them, also where something else refers to them: where it has a default
    value, pydantic leaves that out, and needs it.

    Args:
        part: a schema, perhaps with ``oneOf`` and ``discriminator``.
        references: of the schema that it is a part of.
    """
    alternatives, discriminator = part.get("oneOf"), part.get("discriminator")
    name = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
    if not isinstance(alternatives, list) or not isinstance(name, str) or "anyOf" in part:
        return
    objects: list[dict[str, Any]] = []
    seen: set[str | int] = set()
    for alternative in alternatives:
        of_this = _objects(alternative, references)
        values = [_values(each, name) for each in of_this]
        known = set(itertools.chain(*values))
        if not values or not all(values) or not seen.isdisjoint(known):
            return
        seen |= known
        objects += of_this
    for each in objects:
        required = each.setdefault("required", [])
        if isinstance(required, list) and name not in required:
            required.append(name)
    # In the place of the other: an answer's properties come in the order of the keywords.
    renamed = [("anyOf" if keyword == "oneOf" else keyword, value) for keyword, value in part.items()]
    part.clear()
    part.update(renamed)


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
