"""Alternatives of which exactly one must hold: where they exclude each other, ``oneOf`` is equivalent to ``anyOf``.

The compiler finds that out itself where all are written in place, and refuses others. Pydantic and zod write those that have
names as references.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from radixkv.sampling.json_schema.references import References
from radixkv.tools.exclusive_schemas import differ_in, exclude_each_other

# A union is looked through once for each place that names it; one with more parts stays as it is.
_MAX_PARTS = 256


def replace_one_of(part: dict[str, Any], references: References) -> None:
    """Make ``oneOf`` an ``anyOf``, in place, if the alternatives exclude each other.

    A discriminator that is named becomes required in each of them, also where something else refers to them: where it has a
    default value, pydantic leaves that out, and needs it.

    Args:
        part: a schema, perhaps with ``oneOf`` and ``discriminator``.
        references: of the schema that it is a part of.
    """
    alternatives, discriminator = part.get("oneOf"), part.get("discriminator")
    if not isinstance(alternatives, list) or not alternatives or "anyOf" in part:
        return
    name = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
    groups = [_parts(alternative, references) for alternative in alternatives]
    if isinstance(name, str) and differ_in(groups, name):
        for each in itertools.chain(*groups):
            required = each.setdefault("required", [])
            if isinstance(required, list) and name not in required:
                required.append(name)
    elif not exclude_each_other(groups):
        return
    # In the place of the other: an answer's properties come in the order of the keywords.
    renamed = [("anyOf" if keyword == "oneOf" else keyword, value) for keyword, value in part.items()]
    part.clear()
    part.update(renamed)


def _parts(alternative: Any, references: References) -> list[Any]:
    """The schemas that references and alternatives within an alternative lead to; an empty list if they are too many."""
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
