"""Every form of calls: what is written is read, however it is cut."""

from __future__ import annotations

import contextlib
import itertools
import json
from typing import Any, SupportsIndex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.answer_forms import CALLS, FORMS, calls_of, form_of, functions, read, written
from support.chat_templates import TEMPLATES, make_tokenizer

from radixkv.tools.chat_format import CALL_FORMATS, ChatFormat
from radixkv.tools.formats.derived import DerivedFormat
from radixkv.tools.pieces import ParsedAnswer
from radixkv.tools.source import AnswerSource

DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"


def without_ids(answer: ParsedAnswer) -> Any:
    return (answer.text, answer.reasoning, [(call.name, call.arguments) for call in answer.tool_calls])


@pytest.mark.parametrize("name", FORMS)
def test_the_form_is_found_by_the_template(name: str) -> None:
    found = ChatFormat.of(make_tokenizer(TEMPLATES[name]))
    assert found.calls is CALL_FORMATS[name] if name in CALL_FORMATS else isinstance(found.calls, DerivedFormat)
    assert found.template_takes_tools == (name != "json")


@pytest.mark.parametrize("name", FORMS)
def test_what_is_written_is_read(name: str) -> None:
    answer = read(form_of(name), [written(name)])
    assert functions(answer) == (CALLS[:1] if name == "harmony" else CALLS)
    assert len({call.id for call in answer.tool_calls}) == len(answer.tool_calls)
    assert answer.text == ("I will look. <tool" if calls_of(name).trigger and name != "harmony" else "")
    assert answer.reasoning == ("They want < weather." if name == "harmony" else None)


def num_copied(name: str, num_calls: int) -> int:
    """How many characters are copied to read an answer that arrives whole."""
    copied = 0

    class Counted(str):
        def __getitem__(self, key: SupportsIndex | slice) -> Counted:
            nonlocal copied
            part = super().__getitem__(key)
            copied += len(part)
            return Counted(part)

        def __radd__(self, left: str) -> Counted:
            return Counted(left + str(self))

    form = form_of(name)
    parser = form.parser()
    parser.feed(Counted(form.format.calls.write_calls(CALLS[:1] * num_calls)))
    parser.finish()
    return copied


@pytest.mark.parametrize("name", FORMS)
def test_of_an_answer_with_many_calls_what_is_left_is_not_copied_for_each(name: str) -> None:
    """Sixteen thousand calls that arrived at once took five seconds to read."""
    assert num_copied(name, 80) < 2.5 * num_copied(name, 40)


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
    form, calls = form_of(name, "required"), calls_of(name)
    whole = calls.lead + (written(name) if name == "harmony" else calls.write_calls(CALLS))
    for length in range(len(whole)):
        assert read(form, [whole[:length]]).text == read(form, whole[:length]).text == ""


@pytest.mark.parametrize("name", FORMS)
def test_a_call_that_is_cut_does_not_look_complete(name: str) -> None:
    form, whole = form_of(name), calls_of(name).write_calls(CALLS[:1])
    for length in range(len(whole)):
        for call in read(form, [whole[:length]]).tool_calls:
            with contextlib.suppress(ValueError):
                assert json.loads(call.arguments) == CALLS[0][1]


@pytest.mark.parametrize("name", [name for name in FORMS if name != "harmony"])
def test_after_a_call_what_is_cut_is_no_text(name: str) -> None:
    form, calls = form_of(name), calls_of(name)
    one, two = calls.write_calls(CALLS[:1]), calls.write_calls(CALLS)
    for length in range(len(one.removesuffix(calls.end)), len(two)):
        assert read(form, [two[:length]]).text == ""


@pytest.mark.parametrize("name", FORMS)
def test_what_is_malformed_is_text_even_where_calls_are_required(name: str) -> None:
    malformed = calls_of(name).write_calls([("get_wether", {"city": "Rome"})])
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
        (
            "hermes",
            '<tool_call> { "id" : 12 ,\n "arguments" :\t{"city": "Rome\\nItaly"} , "name":"get_weather" } </tool_call>',
        ),
        (
            "hermes",
            '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\\\nItaly\\"}"}\n</tool_call>\n',
        ),
        (
            "llama3_json",
            '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Rome\\nItaly"}}',
        ),
        (
            "mistral_v3",
            '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome\\nItaly"}, "id": "a1b2c3d4e"}]',
        ),
        ("mistral_v3", '[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Rome\\nItaly"}'),
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
        ("glm", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome\nItaly</arg_value></tool_call>"),
        (
            "glm",
            "<tool_call> get_weather \n\n<arg_key>city</arg_key> <arg_value>Rome\nItaly</arg_value>\n\n</tool_call>\n",
        ),
    ],
)
def test_other_spellings_of_a_family_are_read(name: str, text: str) -> None:
    answer = read(form_of(name), text)
    assert functions(answer) == CALLS[1:]
    assert answer.text == ""


@pytest.mark.parametrize(
    ("name", "written", "arguments", "text"),
    [
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', "{}", ""),
        ("hermes", '<tool_call>{"id": [1, "}"], "name": "now", "type": "a"}</tool_call>', "{}", ""),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', None, '<tool_call>{"arguments": {}}</tool_call>'),
        # What was read of these as their syntax was lost.
        ("hermes", '<tool_call>{"name": "now", "arguments": Rome}', "", ', "arguments": Rome}'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}, "why": 1}', "{}", ', "why": 1}'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}, "parameters": {}}', "{}", ', "parameters": {}}'),
        ("mistral_v3", '[TOOL_CALLS][{"name": "now", "name": 1}]', "", ', "name": 1}]'),
        ("mistral_v3", '[TOOL_CALLS][{"name": "now"} , {"why": 1}]', "{}", ', {"why": 1}]'),
        ("mistral_v3", '[TOOL_CALLS][{"name": "now"}\n]', "{}", ""),
        ("mistral_v11", "[TOOL_CALLS]now[ARGS] {}", "{}", ""),
        ("qwen3_coder", "<tool_call><function=now>\n {}", "", "\n {}"),
        ("glm", "<tool_call>now</tool_call>", "{}", ""),
        ("glm", "<tool_call>now\n {}", "", " {}"),
        ("deepseek_v31", f"{DEEPSEEK}now<｜tool▁sep｜>{{}}\n```\nor not", "{}", "\n```\nor not"),
    ],
)
def test_where_a_call_is_malformed_its_text_is_not_lost(
    name: str, written: str, arguments: str | None, text: str
) -> None:
    for pieces in ([f"{written} and on"], f"{written} and on"):
        answer = read(form_of(name), pieces)
        assert [call.arguments for call in answer.tool_calls] == ([] if arguments is None else [arguments])
        assert answer.text == (f"{text} and on" if text else "and on")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e999", "1e999"), ("[1,\n2.50]", "[1,\n2.50]"), ('["\\ud800"]', '["\\ud800"]'), ("NaN", '"NaN"')],
)
def test_json_between_tags_stays_as_it_is(text: str, value: str) -> None:
    """What is beyond doubles became Infinity, which clients cannot read, and half a character, which a server cannot send."""
    call = f"<tool_call><function=get_weather><parameter=days>{text}</parameter></function></tool_call>"
    assert [each.arguments for each in read(form_of("qwen3_coder"), call).tool_calls] == [f'{{"days": {value}}}']


def test_harmony_s_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is <b>warm</b>.<|return|>"
    )
    assert without_ids(read(form_of("harmony"), text)) == ("I look.It is <b>warm</b>.", "Think.", [])


def test_white_space_that_may_come_before_a_call_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was held back was looked at again with each further newline."""
    num_characters = 0
    peek_from = AnswerSource.peek_from

    def counted(source: AnswerSource, begin: int) -> str:
        nonlocal num_characters
        text = peek_from(source, begin)
        num_characters += len(text)
        return text

    monkeypatch.setattr(AnswerSource, "peek_from", counted)
    answer = ["a", *["\n"] * 500, "b"]
    assert read(form_of("hermes"), answer).text == "".join(answer)
    assert num_characters < 20 * len(answer)
