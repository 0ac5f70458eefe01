"""Names that an object may have, rewritten for the compiler, which has no ``propertyNames``."""

from __future__ import annotations

import re
from typing import Any

from radixkv.cache.arguments import is_whole
from radixkv.sampling.json_schema.formats import replace_format
from radixkv.sampling.json_schema.patterns import rewrite_pattern
from radixkv.sampling.json_schema.references import References

# A pattern that every name matches.
ANY_NAME = ""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_NAME = r"(?:[\w -]|\\[-./$@:])+"
# A pattern of one name or of a few: ^(red|dark-blue)$.
_FEW = re.compile(rf"\^(?:({_NAME})|\((?:\?:)?({_NAME}(?:\|{_NAME})*)\))\$", re.ASCII)
_OF_NAMES = frozenset({"type", "format", "pattern", "minLength", "maxLength", "title", "description"})


def replace_property_names(part: dict[str, Any], references: References) -> None:
    """Make the names that an object may have its properties or their pattern, in place, if it has no others.

    Pydantic writes ``dict[Colour, int]`` in this way, zod ``z.record(z.enum([...]), ...)``. Names that are any text are no
    constraint.

    Args:
        part: a schema, perhaps with ``propertyNames``.
        references: of the schema that it is a part of. That gets the values' schema as a definition, to have it only once.
    """
    names = part.get("propertyNames")
    if names is True:
        names = {}
    if isinstance(names, dict) and "$ref" in names:
        names = references.target_of(names["$ref"])
    if not isinstance(names, dict):
        return
    pattern = _pattern_of(names)
    if pattern == ANY_NAME:
        del part["propertyNames"]
    if pattern == ANY_NAME or "properties" in part or "patternProperties" in part:
        return
    values = part.get("additionalProperties", True)
    match names:
        case {"enum": [*allowed]} if all(isinstance(name, str) for name in allowed):
            schema = references.shared("values", values)
            if schema is None:
                return
            part["properties"] = dict.fromkeys(allowed, schema)
        case {"const": str() as name}:
            part["properties"] = {name: values}
        case _ if pattern is not None:
            part["patternProperties"] = {pattern: values}
        case _:
            return
    part["additionalProperties"] = False
    del part["propertyNames"]


def replace_patterns_of_few_names(part: dict[str, Any], references: References) -> None:
    """Make patterns that only a few names match properties, in place: where all have been used, the compiler expects more.

    Args:
        part: a schema, perhaps with ``patternProperties``.
        references: of the schema that it is a part of.
    """
    patterns, properties = part.get("patternProperties"), part.get("properties", {})
    # The compiler counts properties only where all are required.
    if (
        not isinstance(patterns, dict)
        or not isinstance(properties, dict)
        or {"minProperties", "maxProperties"} & set(part)
    ):
        return
    for pattern, values in [*patterns.items()]:
        found = _FEW.fullmatch(pattern)
        schema = references.shared("values", values) if found else None
        if found is None or schema is None:
            continue
        for name in (found[1] or found[2]).replace("\\", "").split("|"):
            properties = {**properties, name: {"allOf": [properties[name], schema]} if name in properties else schema}
        part["properties"] = properties
        del patterns[pattern]
    if not patterns:
        del part["patternProperties"]


def replace_other_names(part: dict[str, Any]) -> None:
    """Make the names of an object beside its properties those of a pattern that any text matches, in place.

    Where they are not of a pattern, and characters may be written by their numbers, the compiler lets a property's name that
    is written so pass for another. Of a property's name that has to be written so, it does that in both cases.

    Args:
        part: of a schema that has no patterns of names, which the compiler would take this one for, and counts no properties.
    """
    properties, others = part.get("properties"), part.get("additionalProperties", True)
    if (
        isinstance(properties, dict)
        and properties
        and (others is True or others == {})  # a pattern constrains the properties, too
        and not any(map(_CONTROL.search, properties))
    ):
        # Behind all keywords: the compiler follows those before a reference or alternatives by themselves.
        part.pop("additionalProperties", None)
        part["patternProperties"], part["additionalProperties"] = {ANY_NAME: True}, False


def _pattern_of(names: dict[str, Any]) -> str | None:
    """The pattern that is equivalent to a schema of names; None: there is none."""
    if not set(names) <= _OF_NAMES or names.get("type", "string") != "string":
        return None
    rewritten = dict(names)
    replace_format(rewritten)
    rewrite_pattern(rewritten)
    shortest, longest = rewritten.get("minLength", 0), rewritten.get("maxLength", "")
    match rewritten:
        case {"format": _} | {"allOf": _}:
            return None
        case {"pattern": str() as pattern} if shortest == 0 and longest == "":
            return pattern
        case {"pattern": _}:
            return None
    if is_whole(shortest) and (longest == "" or is_whole(longest)):
        return f"^(?s:.{{{shortest},{longest}}})$" if shortest or longest != "" else ANY_NAME
    return None
