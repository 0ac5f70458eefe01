"""Schemas as pydantic, zod and users write them: what they allow may be answered, and nothing else."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any, Literal

import jsonschema
import numpy as np
import pytest
from pydantic import BaseModel, Field

from radixkv import LLM, StructuredOutputsParams
from radixkv.sampling.answer_frames import frame_text, framed
from radixkv.sampling.json_schema import prepare_schema
from radixkv.tools.grammar import AnswerFrame

# Pydantic 2.12 and 2.13 wrote these of a decimal number; zod writes the last of an address.
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
PRICE = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,4}|(?=[\d.]{1,7}0*$)\d{0,4}\.\d{0,2}0*$)"
ADDRESS = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"


class Leaf(BaseModel):
    kind: Literal["leaf"] = "leaf"
    value: int
    beside: Leaf | None = Field(None, deprecated=True)


class Fork(BaseModel):
    kind: Literal["fork"]
    parts: list[Annotated[Leaf | Fork, Field(discriminator="kind")]]


class Black(BaseModel):
    species: Literal["cat"]
    colour: Literal["black"]


class White(BaseModel):
    species: Literal["cat"]
    colour: Literal["white", "cream"]


class Dog(BaseModel):
    species: Literal["dog", "wolf"]


class Owner(BaseModel):
    tree: Annotated[Leaf | Fork, Field(discriminator="kind")]
    pet: Annotated[Annotated[Black | White, Field(discriminator="colour")] | Dog, Field(discriminator="species")]


def accepts(llm: LLM, schema: Any, value: Any) -> bool:
    """Whether an answer may be this value."""
    token_ids = llm.get_tokenizer()(json.dumps(value, ensure_ascii=False), add_special_tokens=False)["input_ids"]
    state = llm.engine.grammars.compile(StructuredOutputsParams(json=schema))
    bitmask = np.zeros((1, -(-state.num_tokens // 32)), dtype=np.int32)
    for token_id in [*token_ids, llm.get_tokenizer().eos_token_id]:
        state.fill_bitmask(bitmask, 0)
        if state.complete:
            return token_id == llm.get_tokenizer().eos_token_id
        if not bitmask[0, token_id // 32] >> (token_id % 32) & 1:
            return False
        state.advance(token_id)
    return True


def one_string(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "string", **keywords}}, "required": ["a"]}


def test_of_a_discriminated_union_one_alternative_is_answered(llm: LLM) -> None:
    """Pydantic's were refused: which alternatives exclude each other was not found out behind references."""
    schema = Owner.model_json_schema()
    leaf = {"kind": "leaf", "value": 3}
    cat = {"species": "cat", "colour": "cream"}
    allowed = [
        {"tree": leaf, "pet": cat},
        {"tree": {"kind": "fork", "parts": [leaf, {"kind": "fork", "parts": []}]}, "pet": {"species": "wolf"}},
    ]
    for value in allowed:
        jsonschema.validate(value, schema)
        assert accepts(llm, schema, value)
    for tree, pet in (({"kind": "fork", "value": 3}, cat), ({"value": 3}, cat), (leaf, {"species": "cat"})):
        assert not accepts(llm, schema, {"tree": tree, "pet": pet})


@pytest.mark.parametrize(
    "alternatives",
    [
        [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}],
        [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/untyped"}],
        [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/other"}],
        [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/none"}],
        [{"$ref": "#/$defs/a"}, {"$ref": "https://example.com/b"}],
        [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/circle"}],
        [{"$ref": "#/$defs/a"}, True],
    ],
)
def test_alternatives_that_may_both_hold_are_not_taken_for_exclusive(alternatives: list[Any]) -> None:
    definitions = {
        "a": {"type": "object", "properties": {"kind": {"const": "a"}}},
        "untyped": {"properties": {"kind": {"const": "b"}}},
        "other": {"type": "object", "properties": {"kind": {"type": "string"}}},
        "circle": {"$ref": "#/$defs/circle"},
    }
    schema = {"oneOf": alternatives, "discriminator": {"propertyName": "kind"}, "$defs": definitions}
    assert "oneOf" in prepare_schema(json.loads(json.dumps(schema)))


@pytest.mark.parametrize(
    ("keywords", "allowed", "refused"),
    [
        ({"pattern": DECIMAL}, ["0", "-12.50", "+.5", "7."], ["", "-", ".", "+.", "1.2.3", "x"]),
        ({"pattern": PRICE}, ["0", "-1234.50", "+.5", "007.2"], ["", "-.", "12345", "1.234", "x"]),
        ({"pattern": r"^(?:\d{0,1}|(?=[\d.]{1,3}0*$)\d{0,1}\.\d{0,1}0*$)"}, ["1", "1.5", "1.50"], ["12", "1.25"]),
        ({"pattern": ADDRESS}, ["a@b.de", "a.b+c@d-e.f.org"], [".a@b.de", "a..b@c.de", "a.@b.de", "a@b", "a@.de"]),
        (
            {"pattern": r"^(?=.*[A-Z])(?=.*(\d|[)]))[^ ]{3,8}$"},
            ["A12", "bC)d"],
            ["abc1", "ABC", "A1", "A 12", "ABCDEFGH1"],
        ),
        ({"pattern": r"^[\p{L} ]{1,50}$", "maxLength": 40}, ["é", 40 * "a"], ["", "a1", 41 * "a"]),
        ({"pattern": r"^\p{L}+$", "minLength": 2, "maxLength": 40}, ["éa", 40 * "a"], ["a", 41 * "a"]),
        ({"pattern": "^[a-z]{4}$", "maxLength": 9}, ["abcd"], ["abc", "abcde"]),
        ({"pattern": "^[a-z]{2,}$", "minLength": 1}, ["ab", 60 * "a"], ["a"]),
    ],
)
def test_a_pattern_means_what_it_says(
    llm: LLM, keywords: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    """Those with lookaheads were refused, and lengths beside classes of letters were too much work."""
    schema = one_string(**keywords)
    for text in allowed:
        if "p{L}" not in keywords["pattern"]:
            jsonschema.validate({"a": text}, schema)
        assert accepts(llm, schema, {"a": text}), text
    for text in refused:
        assert not accepts(llm, schema, {"a": text}), text


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(?!x).*$",
        r"^(?=a)b|c$",
        r"^a(?=b).$",
        r"^(?=((a)))a$",
        r"^(?<=a)b$",
        r"^(?:\d{0,1}|(?=[\d.]{1,3}0*$)\d{0,1}\.\d{0,5}0*$)",
    ],
)
def test_what_other_words_cannot_say_is_refused(llm: LLM, pattern: str) -> None:
    with pytest.raises(ValueError, match=r"json cannot be followed: .*look-around"):
        llm.engine.grammars.compile(StructuredOutputsParams(json=one_string(pattern=pattern)))


def test_values_that_only_look_like_schemas_are_not_limited(llm: LLM) -> None:
    """What an example held was counted as properties, and its patterns were compiled."""
    names = {f"name{number}": number for number in range(1001)}
    data = {"properties": names, "pattern": "a?" * 4000 + "a" * 100}
    schema = {"type": "object", "properties": {"default": {"enum": [3]}}, "required": ["default"]}
    schema |= {"default": data, "examples": [data]}
    assert accepts(llm, schema, {"default": 3})
    with pytest.raises(ValueError, match="at most 1000 properties"):
        prepare_schema({"properties": {"default": {"properties": names}}})
    with pytest.raises(ValueError, match="at most 1000 properties"):
        prepare_schema({"$ref": "#/examples/0", "examples": [data]})


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
        {"propertyNames": {"pattern": "^a"}},
        {"propertyNames": {"$ref": "#/$defs/nothing"}},
    ],
)
def test_other_constraints_on_names_stay_as_they_are(keywords: dict[str, Any]) -> None:
    schema = {"propertyNames": {"enum": ["a"]}, "additionalProperties": {"type": "string"}, **keywords}
    assert prepare_schema(json.loads(json.dumps(schema))) == schema


def test_names_that_are_one_of_a_few_keep_the_definitions_that_there_are(llm: LLM) -> None:
    numbers = {"propertyNames": {"const": "n"}, "additionalProperties": {"type": "integer"}}
    schema = {"$ref": "#/$defs/values-0", "$defs": {"values-0": {"type": "object", **numbers}}}
    assert accepts(llm, schema, {"n": 1})
    assert not accepts(llm, schema, {"n": "1"})
    assert not accepts(llm, schema, {"m": 1})


def test_formats_that_every_string_has_are_accepted(llm: LLM) -> None:
    """Pydantic's of a path and of bytes were refused."""
    for name in ("path", "binary", "password"):
        assert accepts(llm, one_string(format=name), {"a": "x/y"})


def test_of_a_tool_s_schema_that_is_refused_the_patterns_alone_are_left_to_the_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All arguments were: one such pattern, and neither types nor names were enforced."""
    guidance = {"whitespace_pattern": " ?", "lenient": True}
    schema = {**one_string(pattern="^(?!x)"), "title": "f", "x-guidance": guidance}
    frame = frame_text(AnswerFrame("start: @f", {"f": schema}))
    grammars = json.loads(framed(frame, "", lambda text: "look-around" if "(?!x)" in text else None))
    assert grammars["grammars"][1]["json_schema"] == {**one_string(), "title": "f", "x-guidance": guidance}
    assert caplog.messages == [
        "the parameters of 'f' cannot be enforced: look-around; its patterns, and lengths beside them, are left to the model"
    ]


@pytest.mark.parametrize("value", [2**53 + 1, -(10**18) - 1, 2**63, -(2**63), -9.3e18])
def test_values_that_the_compiler_would_round_are_refused(llm: LLM, value: float) -> None:
    """The answer was another number: 9007199254740992 where 9007199254740993 was the only one.

    And -2**63 overflowed the compiler's stack: one request ended the server.
    """
    for values in (
        {"const": value},
        {"enum": [1, value]},
        {"type": "integer", "const": value},
        {"enum": [[{"b": value}]]},
    ):
        with pytest.raises(ValueError, match=r"json cannot be followed: expected const and enum to have numbers of"):
            llm.engine.grammars.compile(StructuredOutputsParams(json={"properties": {"a": values}}))
    grammar = f"start: %json {json.dumps({'const': value})} | %json {{x"
    with pytest.raises(ValueError, match="grammar cannot be followed: expected const and enum to have numbers of"):
        llm.engine.grammars.compile(StructuredOutputsParams(grammar=grammar))
    for exact in (2**53, 10**18, -(2**60)):
        assert accepts(llm, {"const": exact}, exact)


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_may_be_further_out_than_the_compiler_s_numbers(llm: LLM, kind: str) -> None:
    """Those of all numbers of 64 bits were refused, and bounds below them overflowed the compiler's stack."""
    for low, high in ((-(2**63), 2**63 - 1), (-1e300, 1e300), (-1e19, 2**64)):
        schema = {"type": kind, "minimum": low, "maximum": high}
        for value in (-(10**17), 0, 10**17):
            assert accepts(llm, schema, value), schema
    for schema in ({"minimum": -1e19, "maximum": -1e19}, {"allOf": [{"minimum": -9.3e18}, {"maximum": -9.25e18}]}):
        with pytest.raises(ValueError, match="json cannot be followed: "):
            llm.engine.grammars.compile(StructuredOutputsParams(json={"type": kind, **schema}))
    grammar = f'start: %json {{"type": "{kind}", "exclusiveMinimum": -1e19, "maximum": -1e19}}'
    with pytest.raises(ValueError, match="grammar cannot be followed: expected exclusiveMinimum to be at least -9"):
        llm.engine.grammars.compile(StructuredOutputsParams(grammar=grammar))


def test_references_may_lead_through_thousands_of_definitions(llm: LLM) -> None:
    """They overflowed the compiler's stack: one request ended the server."""
    for refer in (
        lambda there: {"allOf": [there]},
        lambda there: {"prefixItems": [there]},
        lambda there: {"additionalProperties": there},
    ):
        definitions = {str(number): refer({"$ref": f"#/$defs/{number + 1}"}) for number in range(1900)}
        schema = {"$ref": "#/$defs/0", "$defs": {**definitions, "1900": {"type": "integer"}}}
        llm.engine.grammars.compile(StructuredOutputsParams(json=schema))


def test_a_union_that_many_places_share_is_looked_through_no_further_than_is_useful() -> None:
    """Each place looked through all of it: a schema of 126 KB took 6 s."""
    leaves = {str(number): {"type": "object", "properties": {"kind": {"const": str(number)}}} for number in range(300)}
    union = {"anyOf": [{"$ref": f"#/$defs/{number}"} for number in leaves]}
    places = [{"oneOf": [{"$ref": "#/$defs/union"}], "discriminator": {"propertyName": "kind"}} for _ in range(2)]
    prepared = prepare_schema({"anyOf": places, "$defs": {"union": union, **leaves}})
    assert all("oneOf" in place for place in prepared["anyOf"])
