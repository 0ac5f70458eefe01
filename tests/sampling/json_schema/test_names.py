"""Names that the objects of a JSON schema may have: by enumerations, patterns and lengths."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel
from support.schemas import accepts, accepts_text

from radixkv import LLM, StructuredOutputsParams
from radixkv.sampling.json_schema.prepare import prepare_schema


class Colour(StrEnum):
    RED = "red"
    DARK_BLUE = "dark/blue"


class Stock(BaseModel):
    numbers: dict[Colour, dict[Literal["small", "large"], int]]
    labels: dict[Literal["only"], str] = {}


def test_names_that_are_one_of_a_few_are_enforced(llm: LLM) -> None:
    """Pydantic's dictionaries whose keys are members of an enumeration, or literals, were refused."""
    schema = Stock.model_json_schema()
    for value in (
        {"numbers": {}},
        {"numbers": {"dark/blue": {"small": 1, "large": 2}}, "labels": {"only": "a"}},
        {"numbers": {"red": {}, "dark/blue": {"large": 3}}},
    ):
        jsonschema.validate(value, schema)
        assert accepts(llm, schema, value), value
    for value in (
        {"numbers": {"green": {}}},
        {"numbers": {"red": {"medium": 1}}},
        {"numbers": {"red": {"small": "1"}}},
        {"numbers": {}, "labels": {"other": "a"}},
    ):
        assert not accepts(llm, schema, value), value


@pytest.mark.parametrize(
    "keywords",
    [
        {"properties": {"a": {}}},
        {"patternProperties": {"^a": {}}},
        {"propertyNames": {"enum": ["a", 1]}},
        {"propertyNames": {"pattern": "^a", "maxLength": 3}},
        {"propertyNames": {"format": "regex"}},
        {"propertyNames": {"type": "integer"}},
        {"propertyNames": {"$ref": "#/$defs/nothing"}},
    ],
)
def test_other_constraints_on_names_stay_as_they_are(keywords: dict[str, Any]) -> None:
    schema = {"propertyNames": {"enum": ["a"]}, "additionalProperties": {"type": "string"}, **keywords}
    assert prepare_schema(json.loads(json.dumps(schema))) == schema


@pytest.mark.parametrize(
    "names", [{}, True, {"type": "string", "title": "Key"}, {"pattern": ""}, {"$ref": "#/properties/a"}]
)
def test_names_that_may_be_any_text_are_no_constraint(names: Any) -> None:
    """Beside properties or patterns, the schema was refused for them, or for a pattern of ours."""
    others = {"properties": {"a": {}}, "patternProperties": {"^b": {}}, "additionalProperties": False}
    assert prepare_schema({"propertyNames": names, **others}) == others


def test_names_that_are_one_of_a_few_keep_the_definitions_that_there_are(llm: LLM) -> None:
    numbers = {"propertyNames": {"const": "n"}, "additionalProperties": {"type": "integer"}}
    schema = {"$ref": "#/$defs/values-0", "$defs": {"values-0": {"type": "object", **numbers}}}
    assert accepts(llm, schema, {"n": 1})
    assert not accepts(llm, schema, {"n": "1"})
    assert not accepts(llm, schema, {"m": 1})


@pytest.mark.parametrize(
    ("names", "allowed", "refused"),
    [
        ({"pattern": "^a[0-9]+$"}, [{}, {"a1": 1}, {"a1": 1, "a22": 2}], [{"a": 1}, {"a1": "x"}, {"b1": 1}]),
        ({"minLength": 1}, [{"a": 1}, {"a\nb": 1}], [{"": 1}, {"a": "x"}]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, [{"ab": 1}, {"abc": 1}], [{"a": 1}, {"abcd": 1}]),
        ({"pattern": "^[a-z]+$", "maxLength": 2}, [{"ab": 1}], [{"abc": 1}, {"1": 1}]),
        ({"format": "uuid4"}, [{"12345678-9abc-4def-8123-456789abcdef": 1}], [{"a": 1}]),
        ({"$ref": "#/$defs/name"}, [{"x": 1}], [{"y": 1}]),
    ],
)
def test_names_of_a_pattern_or_a_length_are_enforced(
    llm: LLM, names: dict[str, Any], allowed: list[Any], refused: list[Any]
) -> None:
    """Pydantic's dictionaries of constrained strings, and zod's records of them, were refused."""
    schema = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
    schema["$defs"] = {"name": {"type": "string", "pattern": "^x$"}}
    for value in allowed:
        assert accepts(llm, schema, value), value
    for value in refused:
        assert not accepts(llm, schema, value), value


def test_patterns_of_names_that_are_properties_add_to_what_these_must_be(llm: LLM) -> None:
    """After the last of them the answer failed: a comma could follow, and no name that was left matched."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "patternProperties": {"^name$": {"maxLength": 3}, "^(?:age|height|eye-colour)$": {"maximum": 300}},
        "required": ["name"],
        "additionalProperties": False,
    }
    for value in ({"name": "Ann"}, {"name": "Ann", "age": 3, "height": 180}, {"name": "", "eye-colour": 1}):
        jsonschema.validate(value, schema)
        assert accepts(llm, schema, value), value
    for value in (
        {"name": "Anna"},
        {"name": "Ann", "age": 301},
        {"name": "Ann", "height": 301},
        {"name": "Ann", "x": 1},
    ):
        assert not accepts(llm, schema, value), value
    assert not accepts_text(llm, StructuredOutputsParams(json=schema), '{"name": "Ann", ')


def test_patterns_that_no_other_name_matches_are_refused(llm: LLM) -> None:
    """Behind the properties, the answer failed."""
    schema = {"type": "object", "patternProperties": {"^na?me?$": {"type": "integer"}}, "additionalProperties": False}
    names = ["name", "nme", "nam", "nm"]
    with pytest.raises(ValueError, match="json cannot be followed: no name that is not among the properties matches"):
        llm.engine.grammars.compile(StructuredOutputsParams(json={**schema, "properties": dict.fromkeys(names, True)}))
    assert accepts(llm, {**schema, "properties": dict.fromkeys(names[:3], True)}, {"name": 1, "nm": 3})


def test_a_name_that_is_written_in_another_way_is_no_other_name(llm: LLM) -> None:
    """Written with the number of a character, it could have any value."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for name in ("patternProperties", "properties"):
        spec = StructuredOutputsParams(
            json={**schema, name: {"^a" if name == "patternProperties" else "a": {"type": "integer"}}}
        )
        assert accepts_text(llm, spec, '{"a": 1, "b\\n\\"": "x"}')
        assert not accepts_text(llm, spec, '{"\\u0061": "x"}')
    assert accepts_text(llm, StructuredOutputsParams(json={"enum": ["a\x01b"]}), r'"a\u0001b"')


def test_a_text_may_have_characters_that_json_writes_by_their_numbers(llm: LLM) -> None:
    """They were left out wherever an object has properties and may have others, which is what pydantic writes."""
    answer = r'{"a": "\u001b[0m"}'
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    for others in ({}, {"additionalProperties": True}, {"additionalProperties": False}):
        spec = StructuredOutputsParams(json={**schema, **others})
        assert accepts_text(llm, spec, answer)
        assert not accepts_text(llm, spec, r'{"a": "", "\u0061": 3}')
    assert accepts_text(llm, StructuredOutputsParams(json={"type": "object"}), answer)
    for others in ({"additionalProperties": {"type": "string"}}, {"patternProperties": {"^a": {"type": "string"}}}):
        assert not accepts_text(llm, StructuredOutputsParams(json={**schema, **others}), answer)
    control = {"type": "object", "properties": {"a\n": {"type": "integer"}}}
    assert not accepts_text(llm, StructuredOutputsParams(json=control), r'{"a\u000a": "x"}')


def test_names_of_a_part_that_has_an_address_of_its_own_are_enforced(llm: LLM) -> None:
    """What their values must be was looked for at that address, and the schema refused."""
    part = {"type": "object", "patternProperties": {"^(?:a|b)$": {"type": "integer"}}, "additionalProperties": False}
    for address in ({}, {"$id": "https://example.com/whole"}):
        schema = {**address, "properties": {"n": {"$id": "https://example.com/part", **part}}, "type": "object"}
        assert accepts(llm, schema, {"n": {"a": 1, "b": 2}})
        assert not accepts(llm, schema, {"n": {"a": "x"}})


def test_names_stay_open_where_alternatives_describe_some(llm: LLM) -> None:
    """Only those were allowed that come before the alternatives, if ``additionalProperties`` does."""
    named = {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": True,
        "anyOf": [named],
    }
    for value in ({"b": "x"}, {"a": 1, "b": "x"}, {"a": 1, "b": "x", "c": 2}):
        assert accepts(llm, schema, value), value
    for value in ({"a": 1}, {"a": "x", "b": "x"}, {"b": 1}):
        assert not accepts(llm, schema, value), value


def test_a_closed_object_that_is_combined_may_count_its_properties(llm: LLM) -> None:
    closed = {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False}
    schema = {"allOf": [closed, {"properties": {"a": {"type": "integer"}}, "minProperties": 1}]}
    assert accepts(llm, schema, {"a": 1})
    assert not accepts(llm, schema, {})


def test_patterns_of_few_names_may_be_in_a_schema_with_any_address(llm: LLM) -> None:
    """What their values must be was looked for at addresses that the compiler did not know, and the schema refused."""
    part = {"type": "object", "patternProperties": {"^(?:a|b)$": {"type": "integer"}}, "additionalProperties": False}
    for address in (
        {"id": "https://example.com/whole", "$schema": "http://json-schema.org/draft-04/schema#"},
        {"$id": "#root"},
    ):
        schema = {"$schema": "http://json-schema.org/draft-07/schema#", **address, **part}
        assert accepts(llm, schema, {"a": 1, "b": 2})
        assert not accepts(llm, schema, {"a": "x"})
