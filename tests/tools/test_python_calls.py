"""Calls in Python's syntax: what models write of values is allowed and read."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from support.answer_forms import CALLS, NOW, WEATHER, Grammar, form_of, functions, options, read, required_call
from support.chat_templates import TEMPLATES, make_tokenizer

from radixkv.tools.chat_format import CALL_FORMATS, AnswerForm, ChatFormat

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "flag": {"type": "boolean"},
    "unit": {"enum": ["c", "it's", True, None]},
    "texts": {"type": "array", "items": {"type": "string"}},
    "matrix": {"type": "array", "items": {"type": "array", "items": {"type": ["boolean", "number"]}}},
    "object": {"type": "object", "properties": {"a": {"type": "boolean"}}},
    "list": {"type": "array", "items": {}},
    "any": {},
    "true": True,
    "short": {"type": "string", "maxLength": 2},
}


def form_with(properties: dict[str, Any]) -> tuple[AnswerForm, Grammar]:
    """A form of a tool ``f`` that takes these arguments, and its grammar."""
    parameters = {"type": "object", "properties": properties}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return required_call("lfm2", tool)


def call_with(value: str) -> str:
    return f"<|tool_call_start|>[f({value})]<|tool_call_end|>"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("text='It\\'s \"a\", (b) \\\\ \\n'", {"text": 'It\'s "a", (b) \\ \n'}),
        ('text="It\'s \\"a\\""', {"text": 'It\'s "a"'}),
        ("text='', optional=None, flag=True", {"text": "", "optional": None, "flag": True}),
        ("optional='null', flag=false", {"optional": "null", "flag": False}),
        ("unit='c'", {"unit": "c"}),
        ("unit='it\\'s'", {"unit": "it's"}),
        ("unit=True", {"unit": True}),
        ("unit=None", {"unit": None}),
        ("texts=['a', \"b\"]", {"texts": ["a", "b"]}),
        ("texts=[]", {"texts": []}),
        ("matrix=[[True, 1.5], []]", {"matrix": [[True, 1.5], []]}),
        ('object={"a": true}', {"object": {"a": True}}),
        ("any=False", {"any": False}),
        ("any='a'", {"any": "a"}),
        ("true=None", {"true": None}),
        ('list=[true, "a", True]', {"list": [True, "a", True]}),
        ('any=[{"a": 1}]', {"any": [{"a": 1}]}),
        ('short="ab"', {"short": "ab"}),
    ],
)
def test_values_are_python_s(written: str, expected: dict[str, Any]) -> None:
    form, grammar = form_with(PROPERTIES)
    assert grammar.accepts(call_with(written))
    for pieces in ([call_with(written)], call_with(written)):
        answer = read(form, pieces)
        assert (answer.text, functions(answer)) == ("", [("f", expected)])


@pytest.mark.parametrize(
    "written",
    ["text=None", "flag='True'", "unit='f'", "texts=['a', 1]", "short='abc'", 'short="abc"', "text='a\nb'", "other=1"],
)
def test_what_the_schema_forbids_is_not_allowed(written: str) -> None:
    _, grammar = form_with(PROPERTIES)
    assert not grammar.accepts(call_with(written))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("text = 'a' , flag = True ,", {"text": "a", "flag": True}),
        ("object={'a': True, 'b': (1, 2)}", {"object": {"a": True, "b": [1, 2]}}),
        ("text='two\nlines'", {"text": "two\nlines"}),
        ("text=two words", {"text": "two words"}),
        ("any=1e999", {"any": float("inf")}),
        ("text='\\ud83d\\ude00'", {"text": "\U0001f600"}),
        ("any=[true, 'a', {'b': null}]", {"any": [True, "a", {"b": None}]}),
        ("any={1, 2}", {"any": "{1, 2}"}),
        ("any=" + "(" * 3000 + ")" * 3000, {"any": "(" * 3000 + ")" * 3000}),
    ],
    ids=["spaces", "literals", "raw-line", "unquoted", "huge", "surrogates", "words", "set", "deep"],
)
def test_what_the_grammar_does_not_allow_is_read_if_it_can_be(written: str, expected: dict[str, Any]) -> None:
    form, _ = form_with(PROPERTIES)
    answer = read(form, [call_with(written)])
    assert functions(answer) == [("f", expected)]
    assert answer.tool_calls[0].arguments.encode()  # UTF-8 cannot hold halves of surrogate pairs


@pytest.mark.parametrize("written", ["'\\ud83d\\ude00'", '"\\ud83d\\ude00"', "'\\ud800'"])
def test_halves_of_characters_stay_escaped(written: str) -> None:
    """As themselves, a server cannot send them."""
    form, _ = form_with(PROPERTIES)
    (call,) = read(form, [call_with(f"text={written}")]).tool_calls
    assert call.arguments == f'{{"text": "{written[1:-1]}"}}'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lfm2", "<|tool_call_start|> [ now( ) ,\n now() ] <|tool_call_end|>"),
        ("olmo3", "<function_calls>\nnow()\nnow()\n</function_calls>"),
    ],
)
def test_white_space_between_calls_is_no_text(name: str, text: str) -> None:
    answer = read(form_of(name), text)
    assert (answer.text, functions(answer)) == ("", [("now", {}), ("now", {})])


def test_calls_that_the_template_leaves_out_are_part_of_the_text() -> None:
    """LFM2's template describes tools and writes results, and no calls: the model saw answers to what was never asked."""
    form = ChatFormat.of(make_tokenizer(TEMPLATES["lfm2"]))
    assert form.template_takes_tools
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {"zone": None}}}
    said = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "noon"}
    written = form.as_template_messages([said, result], options())
    call_text = "<|tool_call_start|>[now(zone=None)]<|tool_call_end|>"
    assert written == [{"role": "assistant", "content": f"I look.\n{call_text}"}, result]


def test_a_model_of_this_form_is_known_by_its_vocabulary_where_its_template_writes_no_calls() -> None:
    template = TEMPLATES["lfm2"].replace("<|tool_call_start|><|tool_call_end|>", "")
    tokenizer = make_tokenizer(template)
    assert ChatFormat.of(tokenizer).calls is CALL_FORMATS["json"]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool_call_start|>", "<|tool_call_end|>"]})
    found = ChatFormat.of(tokenizer)
    assert found.calls is CALL_FORMATS["lfm2"]
    form = found.answer_form("", options(tools=[WEATHER, NOW]))
    assert form is not None
    assert functions(read(form, found.calls.write_calls(CALLS))) == CALLS
    assert len(form.special_markers) == 2


def test_python_prints_no_warnings_of_what_a_model_writes() -> None:
    """From Python 3.12 on, each unknown escape in a call was printed, in 3.11 only where such warnings are wanted."""
    program = r"""
from radixkv.tools.formats.python_calls import _as_json
print(_as_json(r"['\d+']"))
"""
    command = [sys.executable, "-W", "always", "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == '["\\\\d+"]\n'
    assert "escape" not in ended.stderr
