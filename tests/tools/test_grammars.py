"""The grammar of every form of calls allows valid calls only, and what it allows is read as it was meant."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.answer_forms import (
    CALLS,
    FORMS,
    Grammar,
    allowed,
    calls_of,
    form_of,
    functions,
    options,
    read,
    required_call,
    written,
)
from support.chat_templates import DERIVED, TEMPLATES, make_tokenizer
from tokenizers import AddedToken

from radixkv.tools.chat_format import CALL_FORMATS, AnswerForm, ChatFormat
from radixkv.tools.formats.base import CallFormat
from radixkv.tools.formats.derived import DerivedFormat
from radixkv.tools.formats.elements import ElementNotation
from radixkv.tools.formats.tagged_arguments import TaggedArgumentsFormat
from radixkv.tools.grammar import GrammarWriter


@pytest.mark.parametrize("markers", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("name", FORMS)
def test_the_grammar_allows_valid_calls_only(name: str, markers: bool) -> None:
    form, tokenizer = calls_of(name), make_tokenizer(TEMPLATES[name], with_markers=markers)
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


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("name", FORMS)
def test_of_several_tools_only_some_may_be_called(name: str, mode: str) -> None:
    form = form_of(name, allowed("now", mode=mode))
    tokenizer = make_tokenizer(TEMPLATES[name], with_markers=False)
    grammar, write = Grammar(form, tokenizer), calls_of(name).write_calls
    now, other = (write([call]).removesuffix("<|call|>") for call in (("now", {}), CALLS[1]))
    assert grammar.accepts(now)
    assert functions(read(form, [now])) == [("now", {})]
    # Without a marker, the call of a tool that is not among them is other JSON.
    assert grammar.begins(other) == (mode == "auto" and not calls_of(name).trigger and name != "harmony")
    if grammar.begins(other):
        assert not read(form, [other]).tool_calls


# Texts that end or begin something in some form.
SYNTAX = [
    *(
        "<tool_call>",
        "</tool_call>",
        "</function>",
        "<parameter=text>",
        "</parameter>",
        "\n</parameter>",
        "[TOOL_CALLS]",
    ),
    *(
        "[ARGS]",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<|end|>",
        "<|call|>",
        "\n```",
        '<|"|>',
        "]m[",
        *'{}[]"\\\n ;,',
        "a",
        "\u00e9",
    ),
]
TEXTS = st.lists(st.sampled_from(SYNTAX), max_size=5).map("".join)
ARGUMENTS = st.fixed_dictionaries(
    {"text": TEXTS},
    optional={
        "texts": st.lists(TEXTS, max_size=3),
        "object": st.dictionaries(TEXTS, st.none() | TEXTS, max_size=2),
        "number": st.floats(-10, 10).map(lambda number: round(number, 2)),
        "unit": st.sampled_from(["c d", "f"]),
        "kind": st.just("note"),
    },
)
NOTE: Any = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "properties": {
                "text": {"type": "string"},
                "texts": {"type": "array", "items": {"type": "string"}},
                "object": {"type": "object"},
                "number": {"type": "number"},
                "unit": {"enum": ["c d", "f"]},
                "kind": {"const": "note"},
            },
            "required": ["text"],
        },
    },
}


@cache
def note_grammar(name: str) -> tuple[AnswerForm, Grammar]:
    return required_call(name, NOTE, markers=False)


def cannot_be_written(form: CallFormat, arguments: dict[str, Any]) -> bool:
    """Whether a text would end a value, or there is an object that is not described and has no notation."""
    if isinstance(form, TaggedArgumentsFormat):
        return form.value_end in arguments["text"]
    assert isinstance(form, DerivedFormat)
    assert isinstance(form.notation, ElementNotation)
    members, others = form.notation.members, arguments.get("object", {})
    if members.nested is None:
        return members.values.strings.end in arguments["text"]
    if not members.shows_kinds:
        return "object" in arguments
    texts = (arguments["text"], *arguments.get("texts", ()), *map(str, others.values()))
    return any(members.values.strings.end in text for text in texts) or not all(map(str.isalnum, others))


@pytest.mark.parametrize("name", FORMS)
@given(arguments=ARGUMENTS)
@example(arguments={"text": "<a>\n  <parameter>b</parameter>\n</a>", "texts": ["</parameter>", "c"]})
@example(arguments={"text": ""})
@example(arguments={"text": "</parameter>\n"})
def test_what_the_grammar_allows_is_read_as_it_was_meant(name: str, arguments: dict[str, Any]) -> None:
    """Qwen3-Coder's values ended at ``</parameter>``, and in the grammar only where it begins a line. So a file with that tag
    was cut there, and as the arguments were closed at once, the call looked complete."""
    form, grammar = note_grammar(name)
    arguments = {key: arguments[key] for key in NOTE["function"]["parameters"]["properties"] if key in arguments}
    whole = calls_of(name).write_calls([("note", arguments)]).removesuffix("<|call|>")
    if not grammar.accepts(whole):  # only a text that ends a value cannot be written
        assert cannot_be_written(calls_of(name), arguments)
        return
    answer = read(form, [whole])
    assert functions(answer) == [("note", arguments)]
    assert answer.text == ""


@pytest.mark.parametrize("markers", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json", '{"arguments": {"days": [3]}, "name": "get_weather"}'),
        ("json", '{"id": "1", "name": "get_weather", "arguments": {"days": [3]}}'),
        ("json", '{"type": "function", "name": "get_weather", "arguments": {"days": [3]}}'),
        ("json", r'{"name": "get\u005fweather", "arguments": {"days": [3]}}'),
        ("json", '\n{\t"name" :\n"get_weather", "arguments": {"days": [3]}}'),
        ("llama3_json", '{"type": "function", "name": "get_weather", "parameters": {"days": [3]}}'),
        ("llama3_json", '{ "type" : "function","name": "get_weather", "parameters": {"days": [3]}}'),
        ("llama3_json", '{"parameters": {"days": [3]}, "name": "get_weather"}'),
        ("llama3_json", '<|python_tag|>{"name": "get_weather", "parameters": {"days": [3]}}'),
        ("llama3_json", '<|python_tag|>{"parameters": {"days": [3]}, "name": "get_weather"}'),
    ],
)
def test_calls_that_may_be_other_json_are_valid_or_text(name: str, text: str, markers: bool) -> None:
    """The grammar knew calls only by a name that comes first, and what came in another order was read as a call, too."""
    form = form_of(name, markers=markers)
    allowed = Grammar(form, make_tokenizer(TEMPLATES[name], with_markers=markers)).accepts(text)
    assert not (allowed and read(form, [text]).tool_calls)


def test_llama_s_type_may_stand_before_the_name() -> None:
    text = '{"type": "function", "name": "get_weather", "parameters": {"city": "Rome\\nItaly"}}'
    for choice in ("auto", "required"):
        form = form_of("llama3_json", choice)
        assert Grammar(form, make_tokenizer(TEMPLATES["llama3_json"])).accepts(text)
        assert functions(read(form, [text])) == CALLS[1:]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("name", FORMS)
def test_the_name_of_a_tool_is_written_as_the_prompt_has_it(name: str, choice: str) -> None:
    """In JSON, letters that are not ASCII had to be escaped, and a call with the name as it is was read as text."""
    names = ["prüfe", "जाँच.v2:a/b"]
    tools = [{"type": "function", "function": {"name": each}} for each in names]
    tokenizer = make_tokenizer(TEMPLATES[name])
    form = ChatFormat.of(tokenizer).answer_form("", options(choice, tools=tools))
    assert form is not None
    grammar = Grammar(form, tokenizer)
    for each in names:
        text = calls_of(name).write_calls([(each, {})]).removesuffix("<|call|>")
        assert grammar.accepts(text)
        assert functions(read(form, [text])) == [(each, {})]
        with_other = calls_of(name).write_calls([(each, {"x": 1})])
        assert not grammar.begins(with_other)


@pytest.mark.parametrize("choice", ["auto", "none"])
@pytest.mark.parametrize("name", [name for name in FORMS if name != "harmony"])
def test_text_may_hold_added_tokens_that_are_shown(name: str, choice: str) -> None:
    """As Gemma's for the tags of HTML. They were forbidden where nothing marks a call, and where none is allowed."""
    tokenizer = make_tokenizer(TEMPLATES[name])
    tokenizer.add_tokens([AddedToken("<b>", special=False, normalized=False)])
    form = ChatFormat.of(tokenizer).answer_form("", options(choice))
    assert form is not None
    grammar, calls = Grammar(form, tokenizer), calls_of(name).write_calls(CALLS)
    for text in ("It is <b>warm<b>.", "<b>", '{"<b>": 1}'):
        assert grammar.accepts(text)
    assert grammar.accepts(calls) == (choice == "auto")
    # Without a marker, calls can only stand at the start.
    assert grammar.accepts(f"<b>{calls}") == (choice == "auto" or not calls_of(name).trigger)


@pytest.mark.parametrize("markers", [False, True], ids=["spelled", "tokens"])
def test_calls_of_glm_need_no_line_breaks(markers: bool) -> None:
    """GLM 4.7 writes none, and GLM 4.5 some."""
    grammar = Grammar(form_of("glm", markers=markers), make_tokenizer(TEMPLATES["glm"], with_markers=markers))
    begin = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value>"
    assert grammar.accepts(f"I look.{begin}<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>")
    assert grammar.accepts(f"{begin}</tool_call>\n<tool_call>now</tool_call>")
    assert not grammar.begins(f"{begin}<arg_key>days</arg_key><arg_value>three")
    assert not grammar.begins("<tool_call>get_weather<arg_key>place")
    assert not grammar.begins("<tool_call>get_weather</tool_call>")


def test_a_text_may_have_as_many_added_tokens_as_it_likes() -> None:
    """Each took a call within the one for the token before it: a thousand were too many."""
    writer = GrammarWriter({"<a>": 5, "<a>b": 6})
    assert writer.literal("x <a>b<a>" + 2000 * "<a>") == '"x " <[6]>' + 2001 * " <[5]>"
    assert writer.literal("") == '""'


@pytest.mark.parametrize("markers", [False, True], ids=["spelled", "tokens"])
def test_content_and_calls_are_alternatives(markers: bool) -> None:
    tokenizer = make_tokenizer(TEMPLATES["hermes"], with_markers=markers)
    grammar = Grammar(form_of("hermes", markers=markers), tokenizer, 'start: "yes" | "no"')
    assert grammar.accepts("yes")
    assert grammar.accepts(CALL_FORMATS["hermes"].write_calls(CALLS))
    assert not grammar.begins("maybe")


@pytest.mark.parametrize("name", ["hermes", *DERIVED])
def test_as_many_tools_as_an_agent_of_many_servers_has_are_one_grammar(name: str) -> None:
    """120 of Claude Code's size had more characters than a grammar could."""
    properties = {f"argument_{number}": {"type": "string", "description": "d" * 120} for number in range(5)}
    tools = [
        {"type": "function", "function": {"name": f"tool_{number}", "parameters": {"properties": properties}}}
        for number in range(256)
    ]
    _, grammar = required_call(name, *tools)
    call = calls_of(name).write_calls([("tool_255", {"argument_0": "x"})])
    assert grammar.accepts(call)
