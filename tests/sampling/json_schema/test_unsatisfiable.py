"""What nothing satisfies is left out of alternatives, where a reference leads to it, too; as a whole, it is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from support.answer_forms import options
from support.chat_templates import TEMPLATES, make_tokenizer
from support.schemas import accepts, accepts_text, one_string

from radixkv import LLM, StructuredOutputsParams
from radixkv.tools.chat_format import ChatFormat

NEVER = {"type": "integer", "minimum": 5, "maximum": 1}
REFERENCE = {"$ref": "#/$defs/a%20b~1c"}
DEFINITIONS = {
    "a b/c": NEVER,
    "of": {"type": "object", "properties": {"a": REFERENCE}, "additionalProperties": False},
    "needs": {"type": "object", "properties": {"a": {"$ref": "#/$defs/of"}, "b": REFERENCE}, "required": ["b"]},
}
# Their values get a definition of ours.
NAMES = {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": NEVER}
EITHER = {"anyOf": [{"$ref": "#/$defs/needs"}, REFERENCE, {"type": "null"}], "$defs": DEFINITIONS}
VALUES: list[Any] = [{}, {"a": 5}, {"b": 1}, {"a": {}}, {"a": {"b": 1}}, [], [5], 5, None]


@pytest.mark.parametrize(
    "schema",
    [
        EITHER,
        {"oneOf": [REFERENCE, {"type": "null"}]},
        {"type": "object", "properties": {"a": REFERENCE, "b": {"type": "integer"}}},
        {"type": "object", "patternProperties": {"^a": REFERENCE}, "additionalProperties": {"type": "integer"}},
        {"type": "array", "items": REFERENCE},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/of"}}, "additionalProperties": False},
        NAMES,
        {"anyOf": [NAMES, {"type": "null"}]},
    ],
)
def test_what_refers_to_what_nothing_satisfies_is_left_out(llm: LLM, schema: dict[str, Any]) -> None:
    """The schema was refused."""
    whole = {"$defs": DEFINITIONS, **schema}
    validator = jsonschema.Draft202012Validator(whole)
    for value in VALUES:
        assert accepts(llm, whole, value) == validator.is_valid(value), value


@pytest.mark.parametrize("schema", [REFERENCE, {"anyOf": [REFERENCE, {"$ref": "#/$defs/needs"}]}, DEFINITIONS["needs"]])
def test_a_schema_that_nothing_satisfies_is_refused(llm: LLM, schema: dict[str, Any]) -> None:
    message = r"json cannot be followed: .*minimum \(5\) is greater than maximum \(1\)"
    with pytest.raises(ValueError, match=message):
        accepts(llm, {"$defs": DEFINITIONS, **schema}, None)


@pytest.mark.parametrize("names", [["other", "a%20b~1c"], ["a%20b~1c", "other"]])
def test_a_schema_that_is_refused_for_something_else_is_refused_for_that(llm: LLM, names: list[str]) -> None:
    """What nothing satisfies was named as the reason, although it does no harm."""
    other = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    references = [{"$ref": f"#/$defs/{name}"} for name in names]
    message = (
        "json cannot be followed: #/$defs/other/oneOf: this cannot be enforced (more than one alternative may hold"
    )
    with pytest.raises(
        ValueError,
        match=re.escape(message),
    ):
        accepts(llm, {"anyOf": references, "$defs": {**DEFINITIONS, "other": other}}, None)


def test_tools_are_checked_once_where_the_content_has_parts_that_nothing_satisfies(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    """A tool that cannot be enforced was said twice to be left to the model."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": one_string(pattern="^(?!x)")}}]
    form = ChatFormat.of(make_tokenizer(TEMPLATES["json"])).answer_form("", options("auto", tools=tools))
    assert form is not None
    spec = StructuredOutputsParams(json=EITHER, frame=form.frame(content_is_constrained=True))
    assert accepts_text(llm, spec, "null")
    assert caplog.text.count("left to the model") == 1


def test_schemas_within_grammars_tags_and_tools_may_have_parts_that_nothing_satisfies(llm: LLM) -> None:
    structures = [{"begin": "<a>", "schema": EITHER, "end": "</a>"}, {"begin": "<b>", "schema": NAMES, "end": "</b>"}]
    tag = {"triggers": ["<"], "structures": structures}
    assert accepts_text(llm, StructuredOutputsParams(structural_tag=tag), "x<a>null</a><b>{}</b>")
    grammar = f'start: %json {json.dumps(EITHER)} "." %json {json.dumps(NAMES)}'
    assert accepts_text(llm, StructuredOutputsParams(grammar=grammar), "null.{}")
    assert not accepts_text(llm, StructuredOutputsParams(grammar=grammar), "5.{}")
    parameters = {"type": "object", "properties": {"e": EITHER, "n": NAMES}, "required": ["e"], "$defs": DEFINITIONS}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
    form = ChatFormat.of(make_tokenizer(TEMPLATES["json"])).answer_form("", options("required", tools=tools))
    assert form is not None
    calls = StructuredOutputsParams(frame=form.frame(content_is_constrained=False))
    assert accepts_text(llm, calls, '{"name": "f", "arguments": {"e": null, "n": {}}}')
    assert not accepts_text(llm, calls, '{"name": "f", "arguments": {"e": 5}}')
