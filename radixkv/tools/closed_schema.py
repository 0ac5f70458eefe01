"""JSON schemas, closed to properties that they do not name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# With these keywords, what a schema forbids depends on other parts, too.
_COMBINING = frozenset(
    "$ref allOf anyOf oneOf not if patternProperties dependentSchemas propertyNames unevaluatedProperties".split()
)
# These say nothing about values: a reference or alternatives beside them still stand alone.
# The last ones are OpenAPI's.
ANNOTATIONS = frozenset(
    "title description default examples deprecated readOnly writeOnly $comment $defs definitions "
    "example nullable discriminator".split()
)


def closed_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, closed to properties that it does not name, unless it explicitly allows others.

    Functions take no unknown arguments, and small models write them without end. The result allows only what the original
    allows. These stay open: objects that need further properties (``required``, ``minProperties``); parts that combine
    schemas; and, where any part does, definitions. A reference or an ``anyOf`` that stands alone does not combine.
    """
    part = _closed_part(schema)
    closed = dict(_closed_object(schema) if part is schema else part)
    for key in ("$defs", "definitions"):
        definitions = schema.get(key)
        if isinstance(definitions, Mapping) and not _combines(schema):
            closed[key] = {name: _closed_part(part) for name, part in definitions.items()}
    return closed


def _closed_object(schema: Mapping[str, Any]) -> dict[str, Any]:
    closed = dict(schema)
    properties = closed.get("properties")
    if isinstance(properties, Mapping):
        closed["properties"] = {name: _closed_part(part) for name, part in properties.items()}
        # Closed, an object could not have what it needs beyond the properties that it names.
        if not _COMBINING & set(closed) and not _needs_others(closed, properties):
            closed.setdefault("additionalProperties", False)
    if "items" in closed:
        closed["items"] = _closed_part(closed["items"])
    return closed


def _needs_others(schema: Mapping[str, Any], properties: Mapping[str, Any]) -> bool:
    required, least = schema.get("required"), schema.get("minProperties")
    if isinstance(required, list) and any(isinstance(name, str) and name not in properties for name in required):
        return True
    return isinstance(least, int | float) and least > len(properties)


def _closed_part(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    if not _COMBINING & set(schema):
        return _closed_object(schema)
    alternatives = schema.get("anyOf")
    if isinstance(alternatives, list) and set(schema) <= {"anyOf", *ANNOTATIONS}:
        return {**schema, "anyOf": [_closed_part(each) for each in alternatives]}
    return schema


def _combines(schema: Any) -> bool:
    """Whether a part of a schema combines others, so that one that is closed there would forbid what another names."""
    if isinstance(schema, list):
        return any(map(_combines, schema))
    if not isinstance(schema, Mapping):
        return False
    stands_alone = any(set(schema) <= {keyword, *ANNOTATIONS} for keyword in ("$ref", "anyOf"))
    return bool(_COMBINING & set(schema) and not stands_alone) or any(map(_combines, schema.values()))
