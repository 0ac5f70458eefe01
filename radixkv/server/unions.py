"""Unions in request models whose errors name what was sent, rather than every member of the union."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError


@dataclass(frozen=True)
class OneOf:
    """Annotates a union of models, or one model: an object's ``type`` selects the model, and other types are refused.

    Attributes:
        what: the plural of what it is, for the error.
        default: the ``type`` of an object in which it is missing or null; None: it must have one.
    """

    what: str
    default: str | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        models = get_args(source) or (source,)
        if len(models) > 1:
            source = Annotated[source, Field(discriminator="type")]
        types = [kind for model in models for kind in get_args(model.model_fields["type"].annotation)]

        def check(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            kind = value.get("type")
            if kind is None:
                kind = self.default
            if kind not in types:
                raise PydanticCustomError(
                    "type_not_supported",
                    "{what} of type {kind} are not supported, only {types}",
                    {"what": self.what, "kind": f"{kind!r:.80}", "types": ", ".join(types)},
                )
            return {**value, "type": kind}

        return handler.generate_schema(Annotated[source, BeforeValidator(check)])
