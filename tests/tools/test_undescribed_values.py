"""Arguments whose schema leaves open what they are, where strings stand as they are."""

from __future__ import annotations

import itertools
import json
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.answer_forms import FORMS, Grammar, calls_of, functions, read, required_call

from radixkv.tools.chat_format import AnswerForm

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "any": {},
        "optional": {"type": ["string", "null"]},
        "either": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"$ref": "#/$defs/Flags"}]},
        "named": {"enum": ["c", "null", None, 1]},
        "one": {"oneOf": [{"const": "true"}, {"type": "boolean"}]},
    },
    "required": ["any"],
    "additionalProperties": False,
    "$defs": {"Flags": {"type": "array"}},
}
# As they are written: texts, JSON, both in part, and what ends or begins values.
PARTS = [
    *("null", "true", "1", "-1.5", "[1]", '{"a": []}', '"c"', "c", "NaN", "text", "\u00e9"),
    *(" ", "\n", '"', "[", "}", "\\", "<", "</", "]", "</parameter>", "<arg_key>", "]m[", '<|"|>'),
]
WRITTEN = st.lists(st.sampled_from(PARTS), max_size=3).map("".join)
ARGUMENTS = st.fixed_dictionaries(
    {"any": WRITTEN},
    optional={
        "optional": WRITTEN,
        "either": WRITTEN,
        "named": st.sampled_from(["c", "null", "1"]),
        "one": st.sampled_from(["true", "false"]),
    },
)


@cache
def noting(name: str) -> tuple[AnswerForm, Grammar]:
    tool = {"type": "function", "function": {"name": "note", "parameters": PARAMETERS}}
    return required_call(name, tool, markers=False)


@pytest.mark.parametrize("name", FORMS)
@given(arguments=ARGUMENTS, data=st.data())
def test_what_the_grammar_allows_is_valid_however_it_is_cut(
    name: str, arguments: dict[str, str], data: st.DataObject
) -> None:
    form, grammar = noting(name)
    arguments = {key: arguments[key] for key in PARAMETERS["properties"] if key in arguments}
    text = calls_of(name).write_calls([("note", arguments)]).removesuffix("<|call|>")
    if not grammar.accepts(text):
        return
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    ((called, values),) = functions(read(form, [text]))
    assert called == "note"
    jsonschema.validate(values, PARAMETERS)
    for key, written in arguments.items():
        # Nothing is lost: a value is the text, or the JSON that it is.
        assert values[key] == written or values[key] == json.loads(written)
    assert functions(read(form, pieces)) == [("note", values)]
