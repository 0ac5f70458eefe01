"""Alternatives that exclude each other, with jsonschema as the judge of those that do not."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from radixkv.tools.exclusive_schemas import exclude_each_other

CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}}


@pytest.mark.parametrize(
    "alternatives",
    [
        [{"type": "string"}, {"type": "null"}],
        [{"type": ["string", "null"]}, {"type": "integer"}, {"type": "array"}],
        [{"enum": ["a", 1]}, {"const": "b"}, {"type": "boolean"}],
        [{"const": True}, {"const": 1}, {"const": None}],
        [{"type": "string", "enum": ["a", None]}, {"type": "null"}],
        [{"const": [1]}, {"type": "object"}],
        [CAT, DOG, {"type": "array"}],
    ],
)
def test_what_differs_in_types_or_values_is_exclusive(alternatives: list[Any]) -> None:
    assert exclude_each_other([[each] for each in alternatives])
    assert exclude_each_other([alternatives[:1], alternatives[1:]])


@pytest.mark.parametrize(
    ("alternatives", "value"),
    [
        ([{"type": "integer"}, {"type": "number"}], 1),
        ([{"enum": [1, True]}, {"type": "boolean"}], True),
        ([{"const": 1}, {"const": 1.0}], 1),
        ([{"const": [1]}, {"type": "array"}], [1]),
        ([{"enum": ["a"]}, {"type": "string"}], "a"),
        ([{"type": "object"}, {"const": {}}], {}),
        ([{"type": "object"}, CAT], {"kind": "cat"}),
        ([DOG, {**CAT, "required": []}], {}),
        ([{}, {"type": "null"}], None),
        ([True, {"type": "null"}], None),
    ],
)
def test_where_a_value_is_of_two_they_are_not(alternatives: list[Any], value: Any) -> None:
    """Of 1 and true, one was forgotten."""
    assert all(jsonschema.Draft202012Validator(each).is_valid(value) for each in alternatives)
    assert not exclude_each_other([[each] for each in alternatives])


def test_what_is_not_known_is_not_taken_for_exclusive() -> None:
    assert not exclude_each_other([[], [{"type": "null"}]])
