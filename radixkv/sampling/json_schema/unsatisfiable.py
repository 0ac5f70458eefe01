"""Definitions that nothing satisfies: the compiler refuses a schema that refers to one, be it in one of many alternatives."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from radixkv.sampling.json_schema.prepare import subschemas

# Each takes compiling the schema once more.
_MAX_DEFINITIONS = 8
_REFUSAL = re.compile(r"nsatisfiable.* while processing \S*?(#\S*)")


def unsatisfiable_reference(reason: str) -> str | None:
    """A reference for which the compiler refuses a schema: nothing satisfies what it leads to. None: there is none."""
    found = _REFUSAL.search(reason)
    return None if found is None else unquote(found[1])


def leave_out_unsatisfiable(schema: Any, refusal: Callable[[str], str | None]) -> str | None:
    """Make references to what nothing satisfies schemas of no values, in place: as alternatives, these are left out.

    Args:
        schema: prepared.
        refusal: why a schema, as JSON, is refused; None: it is not.

    Returns:
        Why this one is refused nevertheless; None: it is not.
    """
    first = reason = refusal(json.dumps(schema))
    for _ in range(_MAX_DEFINITIONS):
        reference = None if reason is None else unsatisfiable_reference(reason)
        if reference is None:
            break
        for _, part in subschemas(schema):
            if unquote(str(part.get("$ref"))) == reference:
                del part["$ref"]
                part["enum"] = []
        reason = refusal(json.dumps(schema))
    return reason and decisive(first, reason)


def decisive(first: str | None, last: str) -> str:
    """The reason to give for a schema that is refused with references to what nothing satisfies, and without them.

    Args:
        first: why it is refused with them.
        last: why without them; that nothing satisfies the rest is explained by ``first``.
    """
    return first if first is not None and "satisf" in last else last
