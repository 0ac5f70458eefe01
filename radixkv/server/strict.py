"""The base of all request models."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

from radixkv.cache.arguments import is_unicode

# More than any request has. Each unknown field is an error with its own text, and a megabyte holds 100,000 of them.
_MAX_FIELDS = 256
# Depth of lists of numbers: prompts are lists of token ids.
_MAX_LIST_DEPTH = 2


def _stop_at_first_error(schema: Any) -> None:
    """Set `fail_fast` of every list in a schema, wherever it is nested: done by annotations, one could be forgotten."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _stop_at_first_error(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _stop_at_first_error(part)


def _with_whole_numbers(value: Any, depth: int = _MAX_LIST_DEPTH) -> Any:
    """Turn floats such as 5.0 into integers, which float fields accept, too; also in lists, but not in nested objects."""
    if type(value) is float:
        return int(value) if value.is_integer() else value
    if type(value) is list and depth and not {float, list}.isdisjoint(map(type, value)):
        return [_with_whole_numbers(each, depth - 1) for each in value]
    return value


def refuse_lone_surrogates(body: Any) -> Any:
    """Refuse a body that has a lone surrogate anywhere: JSON can hold it, and a response in UTF-8 cannot.

    Returns:
        The body.

    Raises:
        ValidationError: it names the place: of a key, the object that has it.
    """
    wrong = _find_lone_surrogate(body)
    if wrong is not None:
        raise ValidationError.from_exception_data("body", [wrong])
    return body


def _find_lone_surrogate(value: Any) -> InitErrorDetails | None:
    """The first string in a value, at whatever depth, that has a lone surrogate."""
    if isinstance(value, str):
        return None if is_unicode(value) else InitErrorDetails(type="string_unicode", loc=(), input=value)
    if not isinstance(value, dict | list):
        return None
    if isinstance(value, list) and {str, dict, list}.isdisjoint(map(type, value)):
        return None  # a million numbers, passed over in a tenth of the time
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(key, str) and not is_unicode(key):
            return InitErrorDetails(type="string_unicode", loc=(), input=key)
        wrong = _find_lone_surrogate(each)
        if wrong is not None:
            return {**wrong, "loc": (key, *wrong["loc"])}
    return None


class StrictModel(BaseModel):
    """Refuses unknown fields and values of another type, so that no misspelt option is silently ignored.

    Whole numbers may be written as 5.0, because some languages always do.

    The time to refuse a request does not grow with the number of its faults: a list is validated up to its first wrong
    element, and an object with hundreds of fields is refused unread.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_at_first_error(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _read_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > _MAX_FIELDS:
            raise PydanticCustomError(
                "too_many_fields",
                "expected at most {limit} fields, got {number}",
                {"limit": _MAX_FIELDS, "number": len(data)},
            )
        return {name: _with_whole_numbers(value) for name, value in data.items()}
