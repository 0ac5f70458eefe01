"""Unions in request models whose errors name what was sent, rather than every member of the union."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError


def one_of_types(what: str, types: Collection[str], default: str | None = None) -> BeforeValidator:
    """Refuses an object whose ``type`` is not supported, by that type's name.

    Args:
        what: the plural of what it is, for the error.
        types: those that are supported.
        default: of an object whose ``type`` is missing or null; None: it must have one.
    """

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kind = value.get("type")
        if kind is None:
            kind = default
        if kind not in types:
            raise PydanticCustomError(
                "type_not_supported",
                "{what} of type {kind} are not supported, only {types}",
                {"what": what, "kind": f"{kind!r:.80}", "types": ", ".join(types)},
            )
        return {**value, "type": kind}

    return BeforeValidator(check)
