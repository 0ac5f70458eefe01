"""Every form of calls: what is written is read, however it is cut; its grammar allows that and nothing else."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import llguidance
import llguidance.hf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chat_templates import TEMPLATES, make_tokenizer

from radixkv.sampling.structured_output import _frame_text, _framed
from radixkv.tools.chat_format import CALL_FORMATS, AnswerForm, ChatFormat
from radixkv.tools.definitions import ParsedAnswer, ToolOptions, as_tool_options, parsed_answer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["c", "f"]}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'S\u00e3o "Paulo" {', "days": 3, "unit": "c"}),
    ("get_weather", {"city": "Rome\nItaly"}),
]
FORMS = list(CALL_FORMATS)


def options(choice: Any = "auto", parallel: bool = True, tools: Sequence[Any] = (WEATHER, NOW)) -> ToolOptions:
    made = as_tool_options(tools, choice, parallel)
    assert made is not None
    return made


def form_of(
    name: str, choice: Any = "auto", *, parallel: bool = True, markers: bool = False, prompt: str = ""
) -> AnswerForm:
    tokenizer = make_tokenizer(TEMPLATES[name], with_markers=markers)
    form = ChatFormat.of(tokenizer).answer_form(prompt, options(choice, parallel))
    assert form is not None
    return form


def read(form: AnswerForm, pieces: Iterable[str]) -> ParsedAnswer:
    parser = form.parser()
    return parsed_answer([*itertools.chain.from_iterable(parser.feed(piece) for piece in pieces), *parser.finish()])


def functions(answer: ParsedAnswer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]


def without_ids(answer: ParsedAnswer) -> Any:
    return (answer.text, answer.reasoning, [(call.name, call.arguments) for call in answer.tool_calls])


def written(name: str) -> str:
    """An answer with text, as far as the form allows it, and calls."""
    form = CALL_FORMATS[name]
    if name == "harmony":
        thought = "<|channel|>analysis<|message|>They want < weather.<|end|><|start|>assistant"
        return f"{thought}{form.write_calls(CALLS[:1])}"
    text = "I will look. <tool" if form.trigger else ""
    return f"{text}\n{form.write_calls(CALLS)}" if text else form.write_calls(CALLS)


@pytest.mark.parametrize("name", FORMS)
def test_the_form_is_found_by_the_template(name: str) -> None:
    found = ChatFormat.of(make_tokenizer(TEMPLATES[name]))
    assert found.calls is CALL_FORMATS[name]
    assert found.template_takes_tools == (name != "json")


@pytest.mark.parametrize("name", FORMS)
def test_what_is_written_is_read(name: str) -> None:
    answer = read(form_of(name), [written(name)])
    assert functions(answer) == (CALLS[:1] if name == "harmony" else CALLS)
    assert len({call.id for call in answer.tool_calls}) == len(answer.tool_calls)
    assert answer.text == ("I will look. <tool" if CALL_FORMATS[name].trigger and name != "harmony" else "")
    assert answer.reasoning == ("They want < weather." if name == "harmony" else None)


@pytest.mark.parametrize("name", FORMS)
@given(data=st.data())
def test_how_a_text_is_cut_makes_no_difference(name: str, data: st.DataObject) -> None:
    whole = written(name)
    # Also texts that end early, and texts with a character changed: what is no call then is text.
    text = data.draw(st.sampled_from([whole, whole[: data.draw(st.integers(0, len(whole)))]]))
    if data.draw(st.booleans()) and text:
        position = data.draw(st.integers(0, len(text) - 1))
        text = text[:position] + data.draw(st.sampled_from('{}"<x, \n[')) + text[position + 1 :]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    form = form_of(name)
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    assert without_ids(read(form, pieces)) == without_ids(read(form, [text])) == without_ids(read(form, text))


@pytest.mark.parametrize("name", [name for name in FORMS if name != "harmony"])
@pytest.mark.parametrize(
    "text", ["", "Plain text.\n", ' {"colour": "red"}', '{"name": "Ann", "age": 3}', "a < b", '{"name": "get_']
)
def test_what_is_no_call_is_text(name: str, text: str) -> None:
    assert without_ids(read(form_of(name), text)) == (text, None, [])


@pytest.mark.parametrize("name", FORMS)
def test_where_calls_are_required_what_is_cut_is_no_text(name: str) -> None:
    form, calls = form_of(name, "required"), CALL_FORMATS[name]
    whole = calls.lead + (written(name) if name == "harmony" else calls.write_calls(CALLS))
    for length in range(len(whole)):
        assert read(form, [whole[:length]]).text == read(form, whole[:length]).text == ""


@pytest.mark.parametrize("name", FORMS)
def test_a_call_that_is_cut_does_not_look_complete(name: str) -> None:
    form, whole = form_of(name), CALL_FORMATS[name].write_calls(CALLS[:1])
    for length in range(len(whole)):
        for call in read(form, [whole[:length]]).tool_calls:
            with contextlib.suppress(ValueError):
                assert json.loads(call.arguments) == CALLS[0][1]


@pytest.mark.parametrize("name", [name for name in FORMS if name != "harmony"])
def test_after_a_call_what_is_cut_is_no_text(name: str) -> None:
    form, calls = form_of(name), CALL_FORMATS[name]
    one, two = calls.write_calls(CALLS[:1]), calls.write_calls(CALLS)
    for length in range(len(one.removesuffix(calls.end)), len(two)):
        assert read(form, [two[:length]]).text == ""


@pytest.mark.parametrize("name", FORMS)
def test_what_is_malformed_is_text_even_where_calls_are_required(name: str) -> None:
    malformed = CALL_FORMATS[name].write_calls([("get_wether", {"city": "Rome"})])
    assert "get_wether" in read(form_of(name, "required"), [malformed]).text
    assert read(form_of(name, "required"), ["Plain text."]).text == "Plain text."


def test_thoughts_that_are_cut_stay_thoughts_where_calls_are_required() -> None:
    form = form_of("think_open", "required", prompt="<think>\n")
    assert without_ids(read(form, ["Is 1 </thi"])) == ("", "Is 1 </thi", [])
    assert without_ids(read(form, ["Well.</think>\n\n<tool_c"])) == ("", "Well.", [])
    thought = "<|channel|>analysis<|message|>Is 1 <|en"
    assert without_ids(read(form_of("harmony", "required"), [thought])) == ("", "Is 1 <|en", [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"arguments": {"city": "Rome\\nItaly"}, "name":"get_weather"}</tool_call>'),
        (
            "hermes",
            '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\\\nItaly\\"}"}\n</tool_call>\n',
        ),
        (
            "llama3_json",
            '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Rome\\nItaly"}}',
        ),
        ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome\\nItaly"}, "id": "a1b2c3d4e"}]'),
        ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Rome\\nItaly"}'),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            '{"city": "Rome\\nItaly"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
        (
            "harmony",
            ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rome\\nItaly"}',
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\nItaly\n</parameter>\n</function>\n</tool_call>",
        ),
    ],
)
def test_other_spellings_of_a_family_are_read(name: str, text: str) -> None:
    answer = read(form_of(name), text)
    assert functions(answer) == CALLS[1:]
    assert answer.text == ""


def test_harmony_s_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is <b>warm</b>.<|return|>"
    )
    assert without_ids(read(form_of("harmony"), text)) == ("I look.It is <b>warm</b>.", "Think.", [])


class Grammar:
    """What a form allows, for a tokenizer."""

    def __init__(self, form: AnswerForm, tokenizer: Any, content: str | None = None) -> None:
        frame = form.frame(content_is_constrained=content is not None)
        assert frame is not None
        self._tokenizer = tokenizer
        vocabulary = llguidance.hf.from_tokenizer(tokenizer, n_vocab=len(tokenizer))
        self._matcher = llguidance.LLMatcher(vocabulary, _framed(_frame_text(frame), content or ""), log_level=0)
        assert not self._matcher.is_error(), self._matcher.get_error()

    def accepts(self, text: str) -> bool:
        """Whether a text is a whole answer."""
        matcher = self._matcher.deep_copy()
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def begins(self, text: str) -> bool:
        """Whether a text may be the beginning of an answer."""
        matcher = self._matcher.deep_copy()
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return matcher.try_consume_tokens(ids) == len(ids) and not matcher.is_error()


@pytest.mark.parametrize("markers", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("name", FORMS)
def test_the_grammar_allows_valid_calls_only(name: str, markers: bool) -> None:
    form, tokenizer = CALL_FORMATS[name], make_tokenizer(TEMPLATES[name], with_markers=markers)
    end = "<|call|>" if name == "harmony" else ""
    one = form.write_calls(CALLS[1:]).removesuffix(end)
    two = form.write_calls(CALLS)
    wrong_name = one.replace("get_weather", "get_wether")
    wrong_type = form.write_calls([("get_weather", {"city": "Rome", "days": [3]})]).removesuffix(end)
    missing = form.write_calls([("get_weather", {"days": 3})]).removesuffix(end)

    required = Grammar(form_of(name, "required", markers=markers), tokenizer)
    assert required.accepts(one)
    assert required.accepts(two) == form.parallel
    assert not any(required.accepts(text) for text in ("", "Text.", wrong_name, wrong_type, missing, f"{one}x"))

    auto = Grammar(form_of(name, markers=markers), tokenizer)
    assert auto.accepts(one)
    assert not any(auto.begins(text) for text in (wrong_type, missing))
    # Without a marker, only the name of a tool tells a call from other JSON.
    assert auto.begins(wrong_name) == (not form.trigger and name != "harmony")
    if name != "harmony":
        assert auto.accepts("Any text: {")
        assert auto.accepts(written(name))
        assert auto.accepts('{"colour": "red"}')

    single = Grammar(form_of(name, "required", parallel=False, markers=markers), tokenizer)
    assert single.accepts(one)
    assert not single.accepts(two)
    named = {"type": "function", "function": {"name": "now"}}
    assert not Grammar(form_of(name, named, markers=markers), tokenizer).begins(one)
    nothing = Grammar(form_of(name, "none", markers=markers), tokenizer)
    assert not nothing.begins(one)


@pytest.mark.parametrize("markers", [False, True], ids=["spelled", "tokens"])
def test_content_and_calls_are_alternatives(markers: bool) -> None:
    tokenizer = make_tokenizer(TEMPLATES["hermes"], with_markers=markers)
    grammar = Grammar(form_of("hermes", markers=markers), tokenizer, 'start: "yes" | "no"')
    assert grammar.accepts("yes")
    assert grammar.accepts(CALL_FORMATS["hermes"].write_calls(CALLS))
    assert not grammar.begins("maybe")
