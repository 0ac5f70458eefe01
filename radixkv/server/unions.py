"""Unions in request models whose errors name what was sent, rather than every member of the union."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, BeforeValidator
from pydantic_core import PydanticCustomError


def one_of_types(what: str, *models: type[BaseModel], default: str | None = None) -> BeforeValidator:
    """Refuses an object whose ``type`` is not supported, by that type's name.

    Args:
        what: the plural of what it is, for the error.
        models: those that are supported.
        default: the ``type`` of an object in which it is missing or null; None: it must have one.
    """
    types = [kind for model in models for kind in get_args(model.model_fields["type"].annotation)]

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
