"""What references in schemas lead to, where parts have addresses of their own, with jsonschema as the judge."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from support.schemas import accepts

from radixkv import LLM
from radixkv.sampling.json_schema.prepare import prepare_schema

TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
WHOLE, PART = "https://example.com/whole", "https://example.com/part"
REFERS = {"$id": PART, "$defs": {"n": NUMBER}, "type": "array", "items": {"$ref": "#/$defs/n"}}
ANCHORED = {"$id": "part", "$defs": {"n": {"$anchor": "n", **NUMBER}}, "type": "array", "items": {"$ref": "#n"}}
PAIR = {"kind": {"const": "x"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}

# Where "#/$defs/n" leads to a text from the whole, and to a number from the part.
SCHEMAS: dict[str, dict[str, Any]] = {
    "in place": {"$id": WHOLE, "$defs": {"n": TEXT}, "properties": {"a": REFERS}},
    "the whole has no address": {"$defs": {"n": TEXT}, "properties": {"a": REFERS}},
    "by its address": {"$id": WHOLE, "$defs": {"n": TEXT, "p": REFERS}, "properties": {"a": {"$ref": PART}}},
    "by its address and a pointer": {
        "$defs": {"n": TEXT, "p": REFERS},
        "properties": {"a": {"type": "array", "items": {"$ref": f"{PART}#/$defs/n"}}},
    },
    "by a relative address": {"$id": WHOLE, "$defs": {"n": TEXT, "p": REFERS}, "properties": {"a": {"$ref": "part"}}},
    "by a pointer": {"$id": WHOLE, "$defs": {"n": TEXT, "p": REFERS}, "properties": {"a": {"$ref": "#/$defs/p"}}},
    "by a pointer into it": {
        "$defs": {"n": TEXT, "p": {**REFERS, "$defs": {"n": {"$ref": "#/$defs/m"}, "m": NUMBER}}, "m": TEXT},
        "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/p/$defs/n"}}},
    },
    "back to the whole": {
        "$id": WHOLE,
        "$defs": {"n": NUMBER, "m": {"$ref": "#/$defs/n"}},
        "properties": {"a": {"$id": PART, "$defs": {"n": TEXT}, "type": "array", "items": {"$ref": "whole#/$defs/m"}}},
    },
    "by an anchor": {"$defs": {"n": {"$anchor": "n", **TEXT}}, "properties": {"a": ANCHORED}},
    "by an anchor of another part": {
        "$defs": {"n": {"$anchor": "n", **TEXT}, "p": ANCHORED},
        "properties": {"a": {"type": "array", "items": {"$ref": "part#n"}}},
    },
    "a part in a part": {
        "$id": WHOLE,
        "$defs": {"n": TEXT},
        "properties": {
            "a": {"$id": "deep/part", "$defs": {"n": TEXT, "q": {**REFERS, "$id": "other"}}, "$ref": "other"}
        },
    },
    "names that are escaped": {
        "$defs": {"a b/%~": {**REFERS, "$defs": {"n": NUMBER}}},
        "properties": {"a": {"$ref": "#/$defs/a%20b~1%25~0"}},
    },
    "a urn": {
        "$defs": {"n": TEXT, "p": {**REFERS, "$id": "urn:example:part"}},
        "properties": {"a": {"$ref": "urn:example:part"}},
    },
    "alternatives": {
        "$id": WHOLE,
        "$defs": {"n": TEXT},
        "properties": {
            "a": {
                "$id": PART,
                "$defs": {"n": {"type": "array", "items": NUMBER}, "b": FLAG},
                "oneOf": [{"$ref": "#/$defs/n"}, {"$ref": "#/$defs/b"}],
            }
        },
    },
    "the name of a property": {
        "$defs": {"n": TEXT},
        "properties": {"a": REFERS, "$id": {"$ref": "#/$defs/n"}, "$ref": {"$ref": "#/$defs/n"}},
    },
    "data": {
        "$defs": {"n": TEXT},
        "properties": {"a": REFERS, "d": {"enum": [{"$id": "x", "$ref": "#/y"}]}},
        "examples": [{"$id": "x"}],
    },
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {
            "n": TEXT,
            "p": {"$id": PART, "definitions": {"n": {"$id": "#n", **NUMBER}}, "items": {"$ref": "#n"}, "type": "array"},
        },
        "properties": {"a": {"$ref": PART}},
    },
    "draft 4": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "id": WHOLE,
        "definitions": {
            "n": TEXT,
            "p": {"id": "part", "definitions": {"n": NUMBER}, "items": {"$ref": "#/definitions/n"}, "type": "array"},
        },
        "properties": {"a": {"$ref": "part"}},
    },
}
VALUES: list[Any] = [[1], ["x"], [], {}, 1, "x", True]


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_references_lead_from_the_part_that_they_are_in(llm: LLM, schema: dict[str, Any]) -> None:
    """Behind a reference into or out of a part, they led from where it was; alternatives were compared as of the whole."""
    schema = {"type": "object", "additionalProperties": False, "required": ["a"], **schema}
    validator = jsonschema.validators.validator_for(schema)(schema)
    assert validator.is_valid({"a": [1]})
    assert not validator.is_valid({"a": ["x"]})
    for value in VALUES:
        assert accepts(llm, schema, {"a": value}) == validator.is_valid({"a": value}), value
    for more in ({"$id": "x"}, {"$id": 1}, {"$ref": 1}, {"d": {"$id": "x", "$ref": "#/y"}}, {"d": {"$ref": "#/y"}}):
        assert accepts(llm, schema, {"a": [1], **more}) == validator.is_valid({"a": [1], **more}), more


def test_a_part_that_refers_to_itself_is_followed(llm: LLM) -> None:
    part = {"$id": PART, "type": "object", "properties": PAIR, "required": ["kind"], "additionalProperties": False}
    schema = {"type": "object", "properties": {"a": part}, "required": ["a"], "additionalProperties": False}
    for value in ({"kind": "x", "next": {"kind": "x", "next": None}}, {"kind": "x", "next": {"a": {"kind": "x"}}}):
        assert accepts(llm, schema, {"a": value}) == jsonschema.Draft202012Validator(schema).is_valid({"a": value})


@pytest.mark.parametrize(
    "reference", ["#/$defs/nothing", "#nothing", "elsewhere", "https://example.org/#/$defs/n", "#/a"]
)
def test_what_a_part_refers_to_and_does_not_have_is_not_found_in_the_whole(llm: LLM, reference: str) -> None:
    part = {"$id": PART, "$defs": {"n": NUMBER}, "items": {"$ref": reference}}
    definitions = {"nothing": {"$anchor": "nothing", **NUMBER}}
    schema = {"$id": WHOLE, "properties": {"p": part}, "$defs": definitions, "a": NUMBER}
    with pytest.raises(ValueError, match="json cannot be followed: "):
        accepts(llm, schema, {"p": [1]})


def test_a_schema_without_addresses_stays_as_it_is() -> None:
    references = ["#", "#/$defs/a b", "#/$defs/a%20b", "#/$defs/n", "https://example.com/x#/y"]
    schema = {"$defs": {"n": {}, "a b": {}}, "anyOf": [{"$ref": reference} for reference in references]}
    assert prepare_schema({**schema, "anyOf": [*map(dict, schema["anyOf"])]}) == schema
