"""Arguments in forms whose strings stand as they are: what a schema allows may be written, and is read as that value."""

from __future__ import annotations

from typing import Any

import pytest
from support.answer_forms import Grammar, calls_of, form_of, functions, read, required_call
from support.chat_templates import TEMPLATES, make_tokenizer

from radixkv.tools.chat_format import CALL_FORMATS, AnswerForm


def with_unit(schema: dict[str, Any], *others: str, strict: bool = True) -> AnswerForm:
    """For a tool whose one argument has this schema, in Qwen3-Coder's form.

    Args:
        others: required arguments that are not described.
    """
    parameters = {"properties": {"unit": schema}, "required": ["unit", *others]}
    tool = {"type": "function", "function": {"name": "f", "strict": strict, "parameters": parameters}}
    return form_of("qwen3_coder", "required", markers=True, tools=[tool])


@pytest.mark.parametrize("schema", [{"const": "c"}, {"type": "string", "const": "c"}], ids=["untyped", "typed"])
def test_a_string_of_one_value_is_that_value(schema: dict[str, Any]) -> None:
    """Qwen3-Coder's strings are not JSON, and of those with a ``const`` any was allowed, even by a strict tool."""
    grammar = Grammar(with_unit(schema), make_tokenizer(TEMPLATES["qwen3_coder"]))
    write = CALL_FORMATS["qwen3_coder"].write_calls
    assert grammar.accepts(write([("f", {"unit": "c"})]))
    assert not grammar.begins(write([("f", {"unit": "f"})]))


@pytest.mark.parametrize("keyword", ["not", "anyOf", "allOf", "oneOf", "pattern"])
def test_a_strict_string_with_constraints_that_its_text_does_not_show_is_refused(keyword: str) -> None:
    schema = {"type": "string", keyword: [{"maxLength": 3}]}
    with pytest.raises(ValueError, match=f"tools: f: {keyword} of a string cannot be enforced"):
        with_unit(schema).frame(content_is_constrained=False)
    assert with_unit(schema, strict=False).frame(content_is_constrained=False)


def test_of_a_strict_strings_values_those_of_its_length_may_be_written() -> None:
    grammar = Grammar(with_unit({"enum": ["c", "celsius"], "minLength": 2}), make_tokenizer(TEMPLATES["qwen3_coder"]))
    write = CALL_FORMATS["qwen3_coder"].write_calls
    assert grammar.accepts(write([("f", {"unit": "celsius"})]))
    assert not grammar.accepts(write([("f", {"unit": "c"})]))


@pytest.mark.parametrize("name", ["qwen3_coder", "minimax", "lfm2"])
def test_the_schema_of_an_argument_has_the_definitions_to_which_it_leads(name: str) -> None:
    """Each had all of its tool's: 42 tools with seven arguments, and a definition for each, were too large for a grammar."""
    node = {"type": "object", "properties": {"of": {"$ref": "#/$defs/Of"}, "next": {"$ref": "#/$defs/Node"}}}
    definitions = {"Node": node, "Of": {"type": "integer"}, "a/b": {"type": "null"}, "Other": {"type": "boolean"}}
    references = {"node": ["Node", "Of"], "number": [], "other": ["Other"], "escaped": list(definitions)}
    properties = {
        "node": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
        "number": {"type": "number"},
        "other": {"$ref": "#/$defs/Other"},
        "escaped": {"anyOf": [{"$ref": "#/$defs/a~1b"}]},
    }
    parameters = {"properties": properties, "$defs": definitions}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    form, _ = required_call(name, tool)
    frame = form.frame(content_is_constrained=False)
    assert frame is not None
    schemas = [schema for key, schema in frame.schemas.items() if not key.endswith("_item")]
    assert [sorted(schema.get("$defs", {})) for schema in schemas] == [sorted(names) for names in references.values()]


OPTIONAL_TEXTS: list[dict[str, Any]] = [
    {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Value"},
    {"type": ["string", "null"]},
    {"type": ["integer", "string", "null"]},
    {"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]},
    {"oneOf": [{"type": "string"}, {"type": "null"}], "nullable": True},
]
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}


def with_value(name: str, schema: Any, *, strict: bool = False) -> tuple[AnswerForm, Grammar]:
    """For a tool ``f`` whose one argument ``value`` has this schema, in this form."""
    parameters = {"properties": {"value": schema}, "$defs": {"Text": {"type": "string"}, "Node": NODE, "Any": {}}}
    tool = {"type": "function", "function": {"name": "f", "strict": strict, "parameters": parameters}}
    return required_call(name, tool)


@pytest.mark.parametrize("schema", OPTIONAL_TEXTS)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "minimax"])
def test_where_a_string_or_another_value_is_allowed_a_string_is_text(name: str, schema: dict[str, Any]) -> None:
    """It could only be written as JSON, in quotes, as these models do not write it."""
    form, grammar = with_value(name, schema)
    for value in ["text", "Rome\nItaly", '"quoted" text', "[1]", "{x", "", "1.5", "null\n", None]:
        text = form.format.calls.write_calls([("f", {"value": value})])
        assert grammar.accepts(text)
        for pieces in ([text], text):
            assert functions(read(form, pieces)) == [("f", {"value": value})]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "minimax"])
def test_text_that_is_json_of_another_kind_is_that_value(name: str) -> None:
    any_node = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Node"}]}
    for schema, value in ((OPTIONAL_TEXTS[2], 3), (any_node, {"next": {}})):
        form, grammar = with_value(name, schema)
        text = form.format.calls.write_calls([("f", {"value": value})])
        assert grammar.accepts(text)
        assert functions(read(form, text)) == [("f", {"value": value})]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "minimax", "minimax_m3"])
def test_text_that_is_true_is_not_the_number_1(name: str) -> None:
    """Of these two, the schema has the text alone."""
    form, grammar = with_value(name, {"anyOf": [{"type": "string"}, {"enum": [1, 0]}]})
    for value in ("true", "false", 1, 0):
        text = form.format.calls.write_calls([("f", {"value": value})])
        assert grammar.accepts(text)
        (read_value,) = (arguments["value"] for _, arguments in functions(read(form, text)))
        assert (read_value, type(read_value)) == (value, type(value))


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"nullable": True, "example": 3},
        True,
        {"anyOf": [{}, {"type": "null"}], "default": None},
        {"$ref": "#/$defs/Any"},
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "minimax", "minimax_m3"])
def test_where_any_value_is_allowed_a_string_is_text_and_all_else_json(name: str, schema: Any) -> None:
    """A string could only be written in quotes, as these models do not write it."""
    form, grammar = with_value(name, schema, strict=True)
    for value in ("text", "Rome\nItaly", '"quoted"', "", "{x", "NaN", " 1", '{"a": 1}\n', 1.5, None, True):
        text = form.format.calls.write_calls([("f", {"value": value})])
        assert grammar.accepts(text)
        for pieces in ([text], text):
            assert functions(read(form, pieces)) == [("f", {"value": value})]
    text = form.format.calls.write_calls([("f", {"value": '{"a": ["b", 1]}'})])
    assert grammar.accepts(text)
    assert functions(read(form, text)) == [("f", {"value": {"a": ["b", 1]}})]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["string", "null"], "enum": ["c", "f", None]},
        {"enum": ["c", "f", None]},
        # As schemas of Rust's enums are written, whose values have descriptions of their own.
        {"oneOf": [{"const": "c", "description": "cold"}, {"type": "string", "enum": ["f"]}, {"type": "null"}]},
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "minimax", "gemma", "minimax_m3"])
def test_of_an_optional_string_s_values_each_is_text_or_null(name: str, schema: dict[str, Any]) -> None:
    form, grammar = with_value(name, schema)
    write = form.format.calls.write_calls
    for value in ("f", None):
        assert grammar.accepts(write([("f", {"value": value})]))
        assert functions(read(form, write([("f", {"value": value})]))) == [("f", {"value": value})]
    assert not grammar.accepts(write([("f", {"value": "k"})]))


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "minimax", "gemma", "minimax_m3", "lfm2"])
def test_of_a_string_s_values_those_that_are_no_strings_are_not_allowed(name: str) -> None:
    """All were JSON with them, in quotes: OpenAPI 3.0 lists null among the values of a string that is nullable."""
    form, grammar = with_value(name, {"type": "string", "enum": ["c", "f", None]})
    write = form.format.calls.write_calls
    assert grammar.accepts(write([("f", {"value": "f"})]))
    assert functions(read(form, write([("f", {"value": "f"})]))) == [("f", {"value": "f"})]
    assert not grammar.accepts(write([("f", {"value": None})]))


def test_an_argument_that_is_required_and_not_described_is_written() -> None:
    """No call of Qwen3-Coder's form could have it."""
    grammar = Grammar(with_unit({"type": "integer"}, "place"), make_tokenizer(TEMPLATES["qwen3_coder"]))
    write = CALL_FORMATS["qwen3_coder"].write_calls
    assert grammar.accepts(write([("f", {"unit": 3, "place": "Rome"})]))
    assert not grammar.accepts(write([("f", {"unit": 3})]))


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "lfm2", "minimax", "gemma", "minimax_m3"])
def test_one_that_is_described_as_others_are_is_what_that_says(name: str) -> None:
    """It was any text, even of a strict tool."""
    parameters = {"additionalProperties": {"type": "integer"}, "required": ["place"]}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    (form, grammar), write = required_call(name, tool), calls_of(name).write_calls
    assert grammar.accepts(write([("f", {"place": 3})]))
    assert functions(read(form, write([("f", {"place": 3})]))) == [("f", {"place": 3})]
    assert not grammar.accepts(write([("f", {"place": "Rome"})]))
