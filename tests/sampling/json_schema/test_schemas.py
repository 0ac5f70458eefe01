"""Schemas as pydantic, zod and users write them: what they allow may be answered, and nothing else."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field
from support.schemas import accepts, accepts_text

from radixkv import LLM, StructuredOutputsParams
from radixkv.sampling.json_schema.prepare import prepare_schema


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
        [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        [{"type": "integer"}, {"type": "number"}],
        [{"type": ["object", "null"]}, {"$ref": "#/$defs/a"}],
        [{"$ref": "#/$defs/a"}, {"anyOf": [{"type": "object"}, {"type": "null"}]}],
    ],
)
@pytest.mark.parametrize("discriminator", [{"propertyName": "kind"}, None])
def test_alternatives_that_may_both_hold_are_not_taken_for_exclusive(
    alternatives: list[Any], discriminator: Any
) -> None:
    definitions = {
        "a": {"type": "object", "properties": {"kind": {"const": "a"}}},
        "untyped": {"properties": {"kind": {"const": "b"}}},
        "other": {"type": "object", "properties": {"kind": {"type": "string"}}},
        "circle": {"$ref": "#/$defs/circle"},
    }
    schema = {"oneOf": alternatives, "discriminator": {"propertyName": "kind"}, "$defs": definitions}
    assert "oneOf" in prepare_schema(json.loads(json.dumps(schema)))


CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("definitions", "allowed", "refused"),
    [
        ({"a": CAT, "b": DOG}, [{"kind": "cat", "lives": 9}, {"kind": "wolf"}, {}], [{"kind": "dog", "lives": 1}, 3]),
        ({"a": CAT, "b": {"type": "string"}, "c": {"type": "null"}}, [{"kind": "cat"}, "x", None], [1, {}, []]),
        ({"a": {"anyOf": [CAT, {"type": "array"}]}, "b": {"type": "integer"}}, [{"kind": "cat"}, [1], 2], ["x", {}]),
        (
            {"a": {"const": 1}, "b": {"enum": ["x", None]}, "c": {"type": ["array", "boolean"]}},
            [1, "x", None, []],
            [2, "y", {}],
        ),
    ],
)
def test_alternatives_that_exclude_each_other_need_no_named_discriminator(
    llm: LLM, definitions: dict[str, Any], allowed: list[Any], refused: list[Any]
) -> None:
    """Behind references, they were refused."""
    schema = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in definitions], "$defs": definitions}
    for value in allowed:
        jsonschema.validate(value, schema)
        assert accepts(llm, schema, value), value
    for value in refused:
        assert not accepts(llm, schema, value), value


def test_counts_may_be_written_with_a_point(llm: LLM) -> None:
    """They were refused; in JSON Schema, 2.0 is a whole number."""
    schema = {"type": "array", "items": {"type": "string", "maxLength": 1.0}, "minItems": 1.0, "maxItems": 2.0}
    assert all(accepts(llm, schema, value) for value in (["a"], ["a", ""]))
    assert not any(accepts(llm, schema, value) for value in ([], ["ab"], ["a", "a", "a"]))
    with pytest.raises(ValueError, match="'maxItems'"):
        accepts(llm, {**schema, "maxItems": 2.5}, [])


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf"])
def test_alternatives_of_which_there_are_none_are_refused(llm: LLM, keyword: str) -> None:
    """JSON Schema wants at least one."""
    message = re.escape(f"json cannot be followed: #/properties/a/{keyword}: expected at least one schema, got []")
    with pytest.raises(ValueError, match=message):
        accepts(llm, {"type": "object", "properties": {"a": {keyword: []}}}, {})


@pytest.mark.parametrize(
    ("array", "allowed", "refused"),
    [
        ({"items": {"$ref": "#/$defs/size"}}, [[], ["s"], ["l", "s"]], [["s", "s"], ["x"], ["s", "l", "s"]]),
        ({"items": {"type": "boolean"}, "minItems": 1}, [[True], [True, False]], [[], [True, True]]),
        ({"items": {"enum": [1, 2, 3, 4]}, "maxItems": 2}, [[4, 1], []], [[1, 1], [1, 2, 3]]),
        ({"items": {"type": "string"}, "maxItems": 1}, [[], ["a"]], [["a", "b"]]),
    ],
)
def test_arrays_of_a_few_different_values_are_enforced(
    llm: LLM, array: dict[str, Any], allowed: list[Any], refused: list[Any]
) -> None:
    """Pydantic's sets of literals were refused."""
    schema = {"type": "array", "uniqueItems": True, **array, "$defs": {"size": {"type": "string", "enum": ["s", "l"]}}}
    for value in allowed:
        jsonschema.validate(value, schema)
        assert accepts(llm, schema, value), value
    for value in refused:
        assert not accepts(llm, schema, value), value


@pytest.mark.parametrize(
    "array",
    [
        {"items": {"type": "string"}},
        {"items": {"enum": [1, 2, 3, 4, 5]}},
        {"items": {"enum": [1, True]}},
        {"items": {"enum": []}},
        {"items": {"enum": [[1], [2]]}},
        {"items": {"enum": [1, 2], "type": ["integer"]}},
        {"items": {"enum": [1, 2], "maximum": 1}},
        {"items": {"enum": ["a"], "type": "integer"}},
        {"items": {"$ref": "#/$defs/nothing"}},
        {"items": {"enum": [1]}, "prefixItems": [{}]},
        {"items": {"enum": [1]}, "type": ["array", "null"]},
        {"items": {"enum": [1, 2]}, "minItems": -1},
        {"items": {"enum": ["a" * 400, "b" * 400, "c" * 400]}},
    ],
)
def test_other_arrays_of_different_items_are_refused(llm: LLM, array: dict[str, Any]) -> None:
    schema = {"type": "array", "uniqueItems": True, **array}
    with pytest.raises(ValueError, match="#/uniqueItems: this cannot be enforced"):
        llm.engine.grammars.compile(StructuredOutputsParams(json=schema))


def test_only_so_many_arrays_are_named_in_a_schema() -> None:
    """Naming those of a thousand sets made 200 MB of a schema, or took seconds to compile."""
    array = {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/size"}}
    schema = {
        "properties": {f"p{number}": dict(array) for number in range(20)},
        "$defs": {"size": {"enum": ["s", "m", "l", "x"]}},
    }
    arrays = prepare_schema(schema)["properties"].values()
    assert sorted(len(part.get("enum", [])) for part in arrays) == [0] * 5 + [65] * 15


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
    for number in ("1e999", "NaN"):
        with pytest.raises(ValueError, match="grammar cannot be read: #/enum/0: expected a finite number"):
            llm.engine.grammars.compile(StructuredOutputsParams(grammar=f'start: %json {{"enum": [{number}]}}'))
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


def test_schemas_within_a_grammar_are_those_of_json(llm: LLM) -> None:
    """They were compiled as they are: most of what pydantic and zod write was refused, and white space had no limit."""
    pair = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "minItems": 2}
    number = {"type": "integer", "minimum": -(2**63)}
    grammar = f'start: pair | %json {json.dumps(number)} // %json {{x\npair: %json{json.dumps(pair, indent=1)} "."\n'
    for text, allowed in (('["b", "a"].', True), ('["b", "b"].', False), ('["b",  "a"].', False), ("-12", True)):
        assert accepts_text(llm, StructuredOutputsParams(grammar=grammar), text) == allowed, text


def test_what_looks_like_a_schema_in_a_string_of_a_grammar_is_text(llm: LLM) -> None:
    """It was prepared, too: its quotes ended the string, and the grammar was refused."""
    grammar = 'start: "\\"" "%json {}" any\nany: %json {}\n'
    for text, allowed in (('"%json {}[1]', True), ('"%json [1]', False), ('"%json {}[1,  2]', False)):
        assert accepts_text(llm, StructuredOutputsParams(grammar=grammar), text) == allowed, text
    assert accepts_text(llm, StructuredOutputsParams(grammar='root ::= "%json {}"'), "%json {}")


def test_a_schema_within_a_comment_of_a_grammar_is_not_read(llm: LLM) -> None:
    """The grammar was refused for it."""
    refused = '%json {"enum": [1e999]} %json {"const": 9007199254740993}'
    grammar = f"""# {refused}
start: "#%json {{}} // " a /[#]\\/\\/ / <|im_start|> // "{refused}
a: %json {{"const": "// #"}} # {refused}
"""
    spec = StructuredOutputsParams(grammar=grammar)
    assert accepts_text(llm, spec, '#%json {} // "// #"#// <|im_start|>')
    assert not accepts_text(llm, spec, '#%json {} // "// "')
    with pytest.raises(ValueError, match="#/enum/0: expected a finite number"):
        accepts_text(llm, StructuredOutputsParams(grammar=f"start: {refused}"), "")


@pytest.mark.parametrize("comment", ["#", "//", "# or", "// or"])
def test_a_comment_of_a_grammar_may_be_empty(llm: LLM, comment: str) -> None:
    """An empty one of two slashes was taken for the beginning of a regular expression."""
    spec = StructuredOutputsParams(grammar=f'{comment}\nstart: "a" /b#c/ {comment}\n  | "/#"\n')
    assert accepts_text(llm, spec, "ab#c")
    assert accepts_text(llm, spec, "/#")


def test_how_a_schema_within_a_grammar_is_written_is_what_it_says_itself_beside_what_else_holds(llm: LLM) -> None:
    """Where it said one thing, white space had no limit."""
    schema = {"enum": [[1, 2]], "x-guidance": {"key_separator": ": ", "item_separator": ";"}}
    for spec in ({"grammar": f"start: %json {json.dumps(schema)}"}, {"json": schema}):
        for text, allowed in (("[1; 2]", True), ("[1,2]", False), ("[1;  2]", False)):
            assert accepts_text(llm, StructuredOutputsParams(**spec), text) == allowed, (spec, text)
    for options in (1, {"unknown": 1}):
        with pytest.raises(ValueError, match=r"x-guidance|unknown"):
            accepts_text(
                llm, StructuredOutputsParams(grammar=f'start: %json {{"x-guidance": {json.dumps(options)}}}'), ""
            )


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
