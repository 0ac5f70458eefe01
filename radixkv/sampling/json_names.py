"""Objects whose names are one of a few, in words that the compiler takes: it has no ``propertyNames``."""

from __future__ import annotations

import itertools
from typing import Any

from radixkv.sampling.json_references import References


def replace_property_names(part: dict[str, Any], references: References) -> None:
    """Make the names that an object may have its properties, in place, if it has no others.

    Pydantic writes ``dict[Colour, int]`` in this way, zod ``z.record(z.enum([...]), ...)``. Names that are any text are no
    constraint.

    Args:
        part: a schema, perhaps with ``propertyNames``.
        references: of the schema that it is a part of. That gets the values' schema as a definition, to have it only once.
    """
    names = part.get("propertyNames")
    if isinstance(names, dict) and "$ref" in names:
        names = references.target_of(names["$ref"])
    if names == {"type": "string"}:
        del part["propertyNames"]
        return
    match names:
        case {"enum": [*allowed]} if all(isinstance(name, str) for name in allowed):
            pass
        case {"const": str() as name}:
            allowed = [name]
        case _:
            return
    definitions = references.whole.get("$defs", {})
    if not isinstance(definitions, dict) or "properties" in part or "patternProperties" in part:
        return
    values = part.get("additionalProperties", True)
    if not isinstance(values, bool):
        key = next(key for key in map("values-{}".format, itertools.count()) if key not in definitions)
        references.whole["$defs"] = definitions | {key: values}
        values = {"$ref": f"#/$defs/{key}"}
    part["properties"] = dict.fromkeys(allowed, values)
    part["additionalProperties"] = False
    del part["propertyNames"]
