"""What is wrong with a request, in words: from the errors of pydantic, which validates it."""

from __future__ import annotations

import functools
import operator
import reprlib
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel

from radixkv.option_words import hint
from radixkv.server.not_supported import is_supported

# Quotes values in error messages: as much as helps, in a time that does not grow with their size.
_QUOTED = reprlib.Repr()
_QUOTED.maxlevel = 2
_QUOTED.maxstring = _QUOTED.maxother = 60

_PYDANTIC_OPENING = "Input should be "
# How many errors are looked at, and how many are reported.
_MAX_ERRORS, _MAX_REPORTED = 32, 3
# Least likeness to the right field: a misspelt one has it; stop and top_p are less alike.
_LIKE_A_FIELD = 0.7
# A longer field has no name that is nearly right.
_LONGEST_NAME = 64

_Path = tuple[int | str, ...]


def in_words(error: RequestValidationError, request: Request) -> tuple[str, str | None]:
    """A message of the first three places that are wrong, and the field of the request that it names first.

    Args:
        error: holds all of pydantic's errors; a union has one per member.
    """
    located = []
    for each in error.errors()[:_MAX_ERRORS]:
        if each["type"] == "json_invalid":
            return f"body: no JSON from character {each['loc'][1]} on: {each['ctx']['error']}", None
        # The path also holds members of unions, by names that clients do not know.
        is_in_body, path = each["loc"][0] == "body", each["loc"][1:]
        path = _path_in(error.body, path, each["type"] == "missing") if is_in_body else path
        kind = "name_unicode" if is_in_body and _is_about_a_name(each, error.body, path) else each["type"]
        located.append((path, {**each, "type": kind}))
    fields = _fields_of(request)
    by_path: dict[_Path, list[Any]] = {}
    for path, each in located:
        if not _is_of_another_member(path, each, located):
            by_path.setdefault(path, []).append(each)
    reported = dict(islice(by_path.items(), _MAX_REPORTED))
    param = next((part for path in reported for part in path if isinstance(part, str)), None)
    return "; ".join(_in_words(path, errors, fields) for path, errors in reported.items()), param


def _fields_of(request: Request) -> Collection[str]:
    """The supported fields that the body of a request may have; none if it takes no object."""
    route = request.scope.get("route")
    if not isinstance(route, APIRoute) or route.body_field is None:
        return ()
    body = route.body_field.field_info.annotation
    if not (isinstance(body, type) and issubclass(body, BaseModel)):
        return ()
    return [name for name, field in body.model_fields.items() if is_supported(field)]


def _path_in(body: Any, path: _Path, is_missing: bool) -> _Path:
    """The parts of a path that are names and positions in the body, down to what is wrong, or to what is missing."""
    end = path[-1:] if is_missing else ()
    for length in range(len(path) - len(end), 0, -1):
        found = _inner_path(body, path[:length])
        if found is not None:
            return (*found, *end)
    return end


def _inner_path(value: Any, path: _Path) -> _Path | None:
    """The last part of a path, with the parts before it that lead there; None: it is not in the value."""
    if not path:
        return ()
    first, *rest = path
    if isinstance(value, list):
        is_inside = isinstance(first, int) and first < len(value)
    else:
        is_inside = isinstance(value, dict) and first in value
    if is_inside:
        found = _inner_path(value[first], tuple(rest))
        if found is not None:
            return (first, *found)
    return _inner_path(value, tuple(rest)) if rest else None


def _is_about_a_name(error: Any, body: Any, path: _Path) -> bool:
    """Whether the text that is not Unicode is no value, but the name of a field of the object at this path."""
    return bool(error["type"] == "string_unicode" and functools.reduce(operator.getitem, path, body) != error["input"])


def _is_of_another_member(path: _Path, error: Any, all_errors: Sequence[tuple[_Path, Any]]) -> bool:
    """Whether another member of a union fits the value better, so that its error says what is wrong.

    Either this error only says that the value has another type, or the other member accepts more entries of a list.
    """
    return any(
        _is_further(other, path)
        or (
            error["type"].endswith("_type")
            and other[: len(path)] == path
            and (len(other) > len(path) or not found["type"].endswith("_type"))
        )
        for other, found in all_errors
    )


def _is_further(path: _Path, other: _Path) -> bool:
    """Whether a path leads to a later entry of the same list. All lists are validated up to their first wrong entry."""
    for part, of_other in zip(path, other, strict=False):
        if part != of_other:
            return isinstance(part, int) and isinstance(of_other, int) and part > of_other
    return False


def _in_words(path: _Path, errors: Sequence[Any], fields: Collection[str]) -> str:
    """Pydantic's errors for one value, of which a union has several."""
    location = ".".join(map(str, path)) or "body"
    expected = list(dict.fromkeys(map(_expected, errors)))
    if path and all(expected):
        *most, last = expected
        either = f"{', '.join(most)} or {last}" if most else last
        return f"{location}: expected {either}, got {_QUOTED.repr(errors[0]['input'])}"
    return "; ".join(_one_in_words(location, path, each, fields) for each in errors)


def _expected(error: Any) -> str:
    """What one of pydantic's errors expected; empty: its message does not begin with that."""
    if error["type"] == "model_attributes_type":
        return "an object"
    if error["type"] == "string_unicode":
        return "Unicode text"
    if error["type"] == "name_unicode":
        return ""
    message: str = error["msg"]
    return message.removeprefix(_PYDANTIC_OPENING) if message.startswith(_PYDANTIC_OPENING) else ""


def _one_in_words(location: str, path: _Path, error: Any, fields: Collection[str]) -> str:
    """One of pydantic's errors that names no other type or value."""
    context = error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            is_name = len(path) == 1 and len(location) <= _LONGEST_NAME
            return f"{location}: unknown or not supported" + (hint(location, fields, _LIKE_A_FIELD) if is_name else "")
        case "model_attributes_type" | "missing" if not path:
            return "body: expected a JSON object, sent with content-type: application/json"
        case "missing":
            return f"{location}: required"
        case "name_unicode":
            return f"{location}: expected names of fields in Unicode, got {_QUOTED.repr(error['input'])}"
        case "string_pattern_mismatch":
            return f"{location}: expected a text like {context['pattern']}, got {_QUOTED.repr(error['input'])}"
        case "union_tag_not_found":
            return f"{location}.type: required"
        case "union_tag_invalid":
            return f"{location}.type: expected one of {context['expected_tags']}, got {_QUOTED.repr(context['tag'])}"
        case "too_long" | "too_short" | "string_too_long" | "string_too_short" as kind:
            unit = "characters" if kind.startswith("string") else "entries"
            bound = f"at most {context['max_length']}" if kind.endswith("long") else f"at least {context['min_length']}"
            return f"{location}: expected {bound} {unit}, got {len(error['input'])}"
    return f"{location}: {error['msg']}"
