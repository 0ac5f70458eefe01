"""The values that a JSON schema names, by their type or one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

# Of each, the last one includes the others.
_NAMES_OF_TYPES: Mapping[type, Sequence[str]] = MappingProxyType(
    {
        str: ("string",),
        bool: ("boolean",),
        int: ("integer", "number"),
        float: ("number",),
        type(None): ("null",),
        list: ("array",),
        dict: ("object",),
    }
)


def named_values(schema: Mapping[str, Any]) -> Any:
    """The only values that a schema allows, if it names them; else None."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def is_of_type(value: Any, name: Any) -> bool:
    """Whether a value is of the type that schemas call by this name."""
    return name in _NAMES_OF_TYPES.get(type(value), ())


def widest_type(value: Any) -> str | None:
    """The name of a value's type, "number" for a whole number; None: it is nothing that JSON has."""
    names = _NAMES_OF_TYPES.get(type(value))
    return None if names is None else names[-1]
