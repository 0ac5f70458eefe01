"""Arrays whose items differ, rewritten for the compiler, which has no ``uniqueItems``."""

from __future__ import annotations

import itertools
import json
import math
from types import MappingProxyType
from typing import Any

from radixkv.cache.arguments import is_whole
from radixkv.sampling.json_schema.references import References

# Of four values there are 65 arrays, of five 326.
_MAX_VALUES = 4
_MAX_CHARACTERS_OF_VALUES = 1_000
# In a whole schema: compiling this many takes half a second, and ten times as many are too large for the compiler.
_MAX_ARRAYS = 1_000
# Of values that can be compared: the types that a schema may give them.
_KINDS = MappingProxyType({bool: ("boolean",), str: ("string",), int: ("integer", "number")})
_OF_ARRAYS = ("items", "uniqueItems", "minItems", "maxItems")


class UniqueItems:
    """The arrays of different items within one schema.

    Args:
        references: of the schema.
    """

    def __init__(self, references: References) -> None:
        self._references = references
        self._num_listed = 0

    def replace(self, part: dict[str, Any]) -> None:
        """List all arrays that there may be, in place, if they consist of few values; leave out what constrains nothing.

        Pydantic writes ``set[Literal["a", "b"]]`` in this way.

        Args:
            part: of the schema, perhaps with ``uniqueItems``.
        """
        least, most = part.get("minItems", 0), part.get("maxItems", _MAX_VALUES)
        if part.get("uniqueItems") is False or ("uniqueItems" in part and most in (0, 1)):
            del part["uniqueItems"]
        if (
            part.get("uniqueItems") is not True
            or part.get("type") != "array"
            or "enum" in part
            or "prefixItems" in part
        ):
            return
        values = _values(part.get("items"), self._references)
        if not 0 < len(values) <= _MAX_VALUES or not is_whole(least) or least < 0 or not is_whole(most):
            return
        lengths = range(least, min(most, len(values)) + 1)
        num_arrays = self._num_listed + sum(math.perm(len(values), length) for length in lengths)
        if num_arrays > _MAX_ARRAYS or len(json.dumps(values)) > _MAX_CHARACTERS_OF_VALUES:
            return
        self._num_listed = num_arrays
        for keyword in _OF_ARRAYS:
            part.pop(keyword, None)
        part["enum"] = [list(array) for length in lengths for array in itertools.permutations(values, length)]


def _values(schema: Any, references: References) -> list[Any]:
    """The different values that a schema allows; none if they are not known, or may be equal to each other."""
    if isinstance(schema, dict) and "$ref" in schema and set(schema) <= {"$ref", "title", "description"}:
        schema = references.target_of(schema["$ref"])
    match schema:
        case {"type": "boolean", **others} if not others:
            return [False, True]
        case {"enum": [first, *_] as values, **others} if set(others) <= {"type", "title", "description"}:
            kinds = _KINDS.get(type(first), ())
            same_type = all(type(value) is type(first) for value in values)
            if kinds and same_type and others.get("type", kinds[0]) in kinds:
                return list(dict.fromkeys(values))
    return []
