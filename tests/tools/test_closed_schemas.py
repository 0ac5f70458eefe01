"""Objects of a tool's schema get no properties beyond those that it names, and stay possible."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.tools.closed_schema import closed_schema

INTEGER = {"type": "integer"}
OPEN = {"type": "object", "properties": {"a": INTEGER}}
CLOSED = {**OPEN, "additionalProperties": False}
REFERENCE = {"$ref": "#/$defs/A"}


@pytest.mark.parametrize(
    "part",
    [
        REFERENCE,
        {**REFERENCE, "description": "the first", "title": "A"},
        {"anyOf": [REFERENCE, {"type": "null"}], "default": None},
        {"type": "array", "items": REFERENCE},
    ],
    ids=["reference", "described", "optional", "list"],
)
def test_objects_behind_references_are_closed(part: dict[str, Any]) -> None:
    """Only objects at their place were closed, so models of a pydantic model in another could have any property."""
    for name in ("$defs", "definitions"):
        schema = {"type": "object", "properties": {"x": part}, name: {"A": OPEN}}
        closed = {"type": "object", "properties": {"x": part}, name: {"A": CLOSED}, "additionalProperties": False}
        assert closed_schema(schema) == closed


def test_objects_among_alternatives_are_closed() -> None:
    part = {"anyOf": [OPEN, {"type": "null"}], "title": "X"}
    closed = {**part, "anyOf": [CLOSED, {"type": "null"}]}
    assert closed_schema({"properties": {"x": part}})["properties"] == {"x": closed}
    assert closed_schema(part) == closed
    assert closed_schema({**part, "$defs": {"A": OPEN}}) == {**closed, "$defs": {"A": CLOSED}}


@pytest.mark.parametrize(
    "part",
    [
        {"allOf": [REFERENCE, {"properties": {"b": INTEGER}}]},
        {**REFERENCE, "properties": {"b": INTEGER}},
        {"not": REFERENCE},
        {"oneOf": [REFERENCE, OPEN]},
        {"anyOf": [REFERENCE, OPEN], "properties": {"b": INTEGER}},
    ],
    ids=["all of", "beside a reference", "not", "one of", "beside alternatives"],
)
def test_what_is_combined_stays_open(part: dict[str, Any]) -> None:
    closed = closed_schema({"properties": {"x": part, "y": REFERENCE}, "$defs": {"A": OPEN}})
    assert closed["properties"] == {"x": part, "y": REFERENCE}
    assert closed["$defs"] == {"A": OPEN}


def test_an_object_that_requires_more_than_it_names_stays_open() -> None:
    """It was closed, and its tool refused: no object could have what it required."""
    for needed in ({"required": ["a", "x"]}, {"minProperties": 2}):
        schema = {**OPEN, **needed}
        assert closed_schema(schema) == schema
        assert closed_schema({"properties": {"o": schema}})["properties"]["o"] == schema
    assert closed_schema({**OPEN, "required": ["a"], "minProperties": 1})["additionalProperties"] is False
