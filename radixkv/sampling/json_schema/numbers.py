"""Numbers in JSON schemas, which the compiler has as doubles, and whole ones in 64 bits."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from radixkv.cache.arguments import is_number
from radixkv.sampling.json_schema.references import escape_name

# The largest double below 2**63. A range of whole numbers from -2**63 to itself overflows the compiler's stack, which ends
# the process.
_MAX = 2**63 - 1024
_LOWER = ("minimum", "exclusiveMinimum")
_COUNTS = frozenset("minLength maxLength minItems maxItems minProperties maxProperties".split())
_UPPER = ("maximum", "exclusiveMaximum")


def limit_bounds(part: dict[str, Any]) -> None:
    """Make bounds that are further out than the compiler's numbers the largest of these, in place."""
    for keyword in _LOWER:
        if is_number(part.get(keyword)):
            part[keyword] = max(part[keyword], -_MAX)
    for keyword in _UPPER:
        if is_number(part.get(keyword)):
            part[keyword] = min(part[keyword], _MAX)


def make_counts_whole(part: dict[str, Any]) -> None:
    """Make counts that are written as 2.0 whole numbers, in place."""
    for keyword in _COUNTS & set(part):
        if isinstance(part[keyword], float) and part[keyword].is_integer():
            part[keyword] = int(part[keyword])


def infinite_number(schema: Any) -> str | None:
    """Where in a schema, its data included, a number is no finite double: Python reads 1e999 and NaN; None: nowhere."""
    pending = [("#", schema)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{path}/{escape_name(key)}", each) for key, each in value.items()]
        elif isinstance(value, list):
            pending += [(f"{path}/{index}", each) for index, each in enumerate(value)]
        elif is_number(value) and not abs(value) <= sys.float_info.max:
            return f"{path}: expected a finite number, of double precision, got {value!r:.80}"
    return None


def unusable_number(parts: Iterable[dict[str, Any]]) -> str | None:
    """Why the values in these schemas cannot be enforced; None: they can.

    Of values that are no doubles, others would be answered in their place.
    """
    pending = [part[keyword] for part in parts for keyword in ("const", "enum") if keyword in part]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
        elif is_number(value) and (abs(value) > _MAX or int(float(value)) != int(value)):
            return f"expected const and enum to have numbers of at most {_MAX} that a double can be, got {value!r:.80}"
    return None
