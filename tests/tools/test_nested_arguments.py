"""Arguments with lists and objects in notations of their own, as Gemma 4 and MiniMax-M3 write them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from support.answer_forms import Grammar, calls_of, form_of, functions, read
from support.chat_templates import TEMPLATES, make_tokenizer

from radixkv.tools.chat_format import AnswerForm

NOTATIONS = ["gemma", "minimax_m3"]
FLAGS = {"type": "array", "items": {"type": "boolean"}}
ADDRESS = {
    "type": "object",
    "properties": {"street": {"type": "string"}, "number": {"type": "integer"}, "flags": FLAGS},
    "required": ["street"],
}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "address": ADDRESS,
        "others": {"type": "array", "items": {"$ref": "#/$defs/Address"}},
        "matrix": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        "comment": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": ["integer", "null"]},
        "level": {"enum": ["low", 3]},
    },
    "required": ["address"],
    "$defs": {"Address": ADDRESS},
}
ROME, OSLO = {"street": "Via\n{Appia}, [1]", "number": 3, "flags": [True, False]}, {"street": "Karl Johans gate"}


def form_for(name: str, parameters: dict[str, Any], *, strict: bool = False) -> tuple[AnswerForm, Any]:
    tool = {"type": "function", "function": {"name": "send", "strict": strict, "parameters": parameters}}
    return form_of(name, "required", markers=True, tools=[tool]), make_tokenizer(TEMPLATES[name])


@cache
def sending(name: str) -> tuple[AnswerForm, Grammar]:
    form, tokenizer = form_for(name, PARAMETERS, strict=True)
    return form, Grammar(form, tokenizer)


@pytest.mark.parametrize("name", NOTATIONS)
@pytest.mark.parametrize(
    "arguments",
    [
        {"address": ROME},
        {"address": OSLO, "others": []},
        {"address": OSLO, "others": [ROME, OSLO], "matrix": [[1, 2.5], [], [-3]]},
        {"address": OSLO, "comment": "see <b>", "count": 7, "level": "low"},
        {"address": OSLO, "comment": None, "count": None, "level": 3},
    ],
)
def test_lists_and_objects_are_allowed_and_read(name: str, arguments: dict[str, Any]) -> None:
    form, grammar = sending(name)
    text = calls_of(name).write_calls([("send", arguments)])
    assert grammar.accepts(text)
    for pieces in ([text], text):
        assert functions(read(form, pieces)) == [("send", arguments)]
    for length in range(len(text) - 1):
        assert not grammar.accepts(text[:length])


@pytest.mark.parametrize("name", NOTATIONS)
@pytest.mark.parametrize(
    "arguments",
    [
        {"address": {"number": 3}},
        {"address": {"street": "a", "number": True}},
        {"address": {"street": "a", "town": "Rome"}},
        {"address": OSLO, "others": [{"number": 3}]},
        {"address": OSLO, "matrix": [1]},
        {"address": OSLO, "matrix": [["one"]]},
        {"address": OSLO, "count": 1.5},
        {"address": OSLO, "level": "high"},
    ],
)
def test_what_the_schema_forbids_within_them_is_not_allowed(name: str, arguments: dict[str, Any]) -> None:
    _, grammar = sending(name)
    assert not grammar.accepts(calls_of(name).write_calls([("send", arguments)]))


@pytest.mark.parametrize("name", NOTATIONS)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        {"type": "object", "properties": {"a": {"type": "string"}}, "minProperties": 1},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}},
    ],
)
def test_a_strict_schema_that_cannot_be_enforced_is_refused(name: str, schema: dict[str, Any]) -> None:
    form, _ = form_for(name, {"properties": {"value": schema}}, strict=True)
    with pytest.raises(ValueError, match=r"tools: send: .* cannot be enforced in this model's form of calls"):
        form.frame(content_is_constrained=False)
    form, tokenizer = form_for(name, {"properties": {"value": schema}})
    Grammar(form, tokenizer)


@pytest.mark.parametrize(
    "others",
    [
        {"type": "number"},
        {"minimum": 3},
        {"const": 3},
        {"enum": [[3], 5]},
        {"anyOf": [{"const": "c"}, {"const": 5}]},
        {"type": ["boolean", "integer"], "enum": [True, 3.0]},
    ],
)
def test_a_strict_value_without_type_whose_schema_says_more_is_refused_where_it_is_not_json(
    others: dict[str, Any],
) -> None:
    form, _ = form_for("gemma", {"properties": {"value": {"oneOf": [{"type": "integer"}, others]}}}, strict=True)
    with pytest.raises(ValueError, match="tools: send: oneOf cannot be enforced in this model's form of calls"):
        form.frame(content_is_constrained=False)


@pytest.mark.parametrize("name", NOTATIONS)
def test_a_schema_may_write_whole_numbers_with_a_point(name: str) -> None:
    form, tokenizer = form_for(name, {"properties": {"value": {"type": ["integer", "string"], "enum": [1.0, "a"]}}})
    for value in (1, "a"):
        text = calls_of(name).write_calls([("send", {"value": value})])
        assert Grammar(form, tokenizer).accepts(text)
        assert functions(read(form, text)) == [("send", {"value": value})]


@pytest.mark.parametrize("name", NOTATIONS)
@pytest.mark.parametrize("value", ["text", '"quoted" text', '"quoted"', "[1]", "{x", "{}", "", "1.5", 3, None])
@pytest.mark.parametrize(
    "schema",
    [{"type": ["integer", "string", "null"]}, {"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}, {"enum": [3]}]}],
)
def test_text_is_a_string_where_other_values_are_allowed_as_well(name: str, value: Any, schema: dict[str, Any]) -> None:
    parameters = {"properties": {"value": schema, "list": {"type": "array", "items": schema}}}
    form, tokenizer = form_for(name, {**parameters, "$defs": {"Text": {"type": "string"}}})
    arguments = {"value": value, "list": [value, value]}
    text = calls_of(name).write_calls([("send", arguments)])
    assert Grammar(form, tokenizer).accepts(text)
    for pieces in ([text], text):
        assert functions(read(form, pieces)) == [("send", arguments)]


@pytest.mark.parametrize("name", NOTATIONS)
@pytest.mark.parametrize("written", [" 3", " null"])
def test_white_space_that_the_grammar_allows_before_json_is_no_part_of_it(name: str, written: str) -> None:
    form, tokenizer = form_for(name, {"properties": {"value": {"type": ["integer", "null"]}}})
    text = calls_of(name).write_calls([("send", {"value": 70571})]).replace("70571", written)
    assert Grammar(form, tokenizer).accepts(text)
    for pieces in ([text], text):
        assert functions(read(form, pieces)) == [("send", {"value": json.loads(written)})]


def test_json_of_an_object_is_one_where_text_is_allowed_as_well() -> None:
    form, tokenizer = form_for("minimax_m3", {"properties": {"value": {"type": ["string", "object"]}}})
    text = calls_of("minimax_m3").write_calls([("send", {"value": '{"a": 1}'})])
    assert Grammar(form, tokenizer).accepts(text)
    assert functions(read(form, text)) == [("send", {"value": {"a": 1}})]


@pytest.mark.parametrize("name", NOTATIONS)
def test_text_with_the_definition_of_a_string_is_one(name: str) -> None:
    parameters = {"properties": {"value": {"$ref": "#/$defs/Text"}}, "$defs": {"Text": {"type": "string"}}}
    form, tokenizer = form_for(name, parameters)
    text = calls_of(name).write_calls([("send", {"value": "3"})])
    assert Grammar(form, tokenizer).accepts(text)
    assert functions(read(form, text)) == [("send", {"value": "3"})]


@pytest.mark.parametrize("name", NOTATIONS)
def test_a_list_that_is_too_deep_to_be_read_is_no_argument(name: str) -> None:
    form, _ = form_for(name, {"properties": {"value": {"type": "array"}}})
    value: list[Any] = [True]
    for _ in range(60):
        value = [value]
    text = calls_of(name).write_calls([("send", {"value": value})])
    assert functions(read(form, [text])) == [("send", {"value": value})]
    (begin, end) = ("[", "]") if name == "gemma" else ("]m[<item>", "]m[</item>")
    (call,) = read(form, [text.replace(begin * 60, begin * 2000).replace(end * 60, end * 2000)]).tool_calls
    assert (call.name, call.arguments) == ("send", "")


@pytest.mark.parametrize(
    "value", ["text", 3, None, [], {}, ["a", 1, {"b": [True]}], {"a": {"b": {"c": "d"}}, "e": [[]]}]
)
def test_where_a_value_shows_its_kind_one_that_is_not_described_is_written_as_any(value: Any) -> None:
    form, tokenizer = form_for("gemma", {"properties": {"value": {}}})
    text = calls_of("gemma").write_calls([("send", {"value": value})])
    assert Grammar(form, tokenizer).accepts(text)
    assert functions(read(form, text)) == [("send", {"value": value})]


def test_where_keys_are_not_described_their_values_may_be() -> None:
    """Even a strict tool's dictionary of strings could have numbers."""
    schema = {"type": "object", "additionalProperties": {"type": ["string", "null"]}}
    form, tokenizer = form_for("gemma", {"properties": {"value": schema}}, strict=True)
    grammar, write = Grammar(form, tokenizer), calls_of("gemma").write_calls
    for value in ({}, {"a": "x", "b": None}):
        text = write([("send", {"value": value})])
        assert grammar.accepts(text)
        assert functions(read(form, text)) == [("send", {"value": value})]
    assert not grammar.accepts(write([("send", {"value": {"a": 1}})]))
    form, _ = form_for("gemma", {"properties": {"value": {**schema, "additionalProperties": False}}}, strict=True)
    empty = Grammar(form, tokenizer)
    assert empty.accepts(write([("send", {"value": {}})]))
    assert not empty.accepts(write([("send", {"value": {"a": "x"}})]))


@pytest.mark.parametrize(
    "others",
    [{"patternProperties": {"^a": {"type": "string"}}}, {"required": True, "properties": {"a": {"type": "string"}}}],
)
def test_where_keys_are_described_in_another_way_further_ones_are_not_all(others: dict[str, Any]) -> None:
    """Only an empty object was allowed."""
    form, tokenizer = form_for(
        "gemma", {"properties": {"value": {"type": "object", "additionalProperties": False, **others}}}
    )
    text = calls_of("gemma").write_calls([("send", {"value": {"a": "x"}})])
    assert Grammar(form, tokenizer).accepts(text)


@pytest.mark.parametrize(
    "others", [{"required": ["a"]}, {"additionalProperties": {}, "minProperties": 1}, {"items": False}]
)
def test_what_cannot_be_enforced_of_an_object_that_is_not_described_is_refused(others: dict[str, Any]) -> None:
    form, _ = form_for("gemma", {"properties": {"value": {"type": "object", **others}}}, strict=True)
    with pytest.raises(ValueError, match=f"tools: send: {list(others)[-1]} cannot be enforced"):
        form.frame(content_is_constrained=False)


@pytest.mark.parametrize("name", NOTATIONS)
@pytest.mark.parametrize("keyword", ["anyOf", "oneOf"])
def test_of_several_kinds_of_objects_each_is_read_as_it_is_described(name: str, keyword: str) -> None:
    """All were read as the first kind: a text that only another one has, and that looks like a number, became one."""
    kinds: list[dict[str, Any]] = [
        {"type": "object", "properties": {"kind": {"const": "p"}, "at": {"type": "integer"}}, "required": ["kind"]},
        {"type": "object", "properties": {"kind": {"const": "q"}, "text": {"type": "string"}}, "required": ["kind"]},
    ]
    lists = {keyword: [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
    union = {keyword: kinds, "discriminator": {"propertyName": "kind"}}
    form, tokenizer = form_for(name, {"properties": {"value": union, "list": lists}}, strict=True)
    for value in ({"kind": "p", "at": 3}, {"kind": "q", "text": "3"}):
        arguments = {"value": value, "list": ["3"]}
        text = calls_of(name).write_calls([("send", arguments)])
        assert Grammar(form, tokenizer).accepts(text)
        assert functions(read(form, text)) == [("send", arguments)]


def test_where_it_does_not_such_a_value_is_json_or_text() -> None:
    form, tokenizer = form_for("minimax_m3", {"properties": {"value": {}, "list": {"type": "array", "items": {}}}})
    text = ']m[<tool_call>\n]m[<invoke name="send">]m[<value>{"a": ["b", 1]}]m[</value>]m[</invoke>\n]m[</tool_call>'
    assert Grammar(form, tokenizer).accepts(text)
    assert functions(read(form, text)) == [("send", {"value": {"a": ["b", 1]}})]
    arguments = {"value": "b c", "list": ["b c", 1, '"d"']}
    text = calls_of("minimax_m3").write_calls([("send", arguments)])
    assert Grammar(form, tokenizer).accepts(text)
    assert functions(read(form, text)) == [("send", arguments)]


def test_an_object_that_has_itself_within_it_is_any_object_there() -> None:
    node = {"type": "object", "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/Node"}}}
    form, tokenizer = form_for("gemma", {"properties": {"list": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": node}})
    arguments = {"list": {"name": "a", "next": {"name": "b", "next": {"name": "c"}}}}
    text = calls_of("gemma").write_calls([("send", arguments)])
    assert Grammar(form, tokenizer).accepts(text)
    assert functions(read(form, text)) == [("send", arguments)]


@pytest.mark.parametrize("name", NOTATIONS)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": None},
        {"type": "object", "properties": ["a"]},
        {"anyOf": {"type": "string"}},
        {"$ref": ["#/$defs/Address"]},
        {"$ref": "#/$defs/Missing"},
        {"type": "array", "items": [{"type": "string"}]},
        {"type": ["string", ["object"]], "enum": 3},
        True,
    ],
)
def test_a_malformed_part_of_a_schema_does_not_break_the_rest(name: str, schema: Any) -> None:
    form, _ = form_for(name, {"properties": {"value": schema}})
    frame = form.frame(content_is_constrained=False)
    assert frame is not None
    assert "send" in frame.lark
    for value in ({"a": "b"}, ["a"], "a", 3):
        (call,) = read(form, calls_of(name).write_calls([("send", {"value": value})])).tool_calls
        assert call.name == "send"


def chained(begin: Any, last: Any) -> dict[str, Any]:
    """Definitions, each of which refers to the next one twice."""
    names = [f"D{index}" for index in range(18)]
    references = [{"$ref": f"#/$defs/{name}"} for name in names[1:]]
    definitions = {name: begin(reference) for name, reference in zip(names, references, strict=False)}
    return {"properties": {"value": {"$ref": "#/$defs/D0"}}, "$defs": {**definitions, names[-1]: last}}


@pytest.mark.parametrize("name", [*NOTATIONS, "qwen3_coder"])
def test_alternatives_that_are_equal_by_reference_are_written_once(name: str) -> None:
    """They were written twice for each reference: a kilobyte of definitions took all memory."""
    parameters = chained(lambda reference: {"anyOf": [reference, reference]}, {"type": ["string", "null"]})
    form, _ = form_for(name, parameters)
    frame = form.frame(content_is_constrained=False)
    assert frame is not None
    assert len(frame.lark) < 1000


@pytest.mark.parametrize("name", NOTATIONS)
def test_objects_that_are_too_many_by_reference_are_refused_before_they_are_written(name: str) -> None:
    parameters = chained(
        lambda reference: {"type": "object", "properties": {"a": reference, "b": reference}}, {"type": "string"}
    )
    form, _ = form_for(name, parameters)
    with pytest.raises(ValueError, match="tools: as a grammar, they have more characters than 327680, the maximum"):
        form.frame(content_is_constrained=False)
