"""Forms of calls that are derived from chat templates of unknown families."""

from __future__ import annotations

from typing import Any

import pytest
from support.answer_forms import CALLS, NOW, WEATHER, Grammar, form_of, functions, options, read
from support.chat_templates import TEMPLATES, chatml, make_tokenizer, written_calls

from radixkv.tools.chat_format import CALL_FORMATS, AnswerForm, ChatFormat
from radixkv.tools.formats.derived import DerivedFormat

NAME, ARGUMENTS = "{{ call.function.name }}", "{{ call.function.arguments | tojson }}"
JSON_CALL = f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'
VALUE = "{{ value if value is string else value | tojson }}"
# Arguments in elements whose frame tells strings from other values.
TYPED = (
    "{% for key, value in call.function.arguments | items %}"
    f"<p name=\"{{{{ key }}}}\" text=\"{{{{ 'yes' if value is string else 'no' }}}}\">{VALUE}</p>{{% endfor %}}"
)
SEPARATED = (
    "{% for key, value in call.function.arguments | items %}"
    f"{{{{ key }}}}:<v>{VALUE}</v>{{% if not loop.last %}}, {{% endif %}}{{% endfor %}}"
)
DERIVABLE = {
    "list": written_calls(JSON_CALL, "<|tool_call|>[", ", ", "]"),
    "list-in-tags": written_calls(JSON_CALL, "<tool_calls>[", ", ", "]</tool_calls>"),
    "lines": written_calls(f"{JSON_CALL}\n", "<tool_calls>\n", "", "</tool_calls>"),
    "words": written_calls(JSON_CALL, "Action:\n```json\n[", ",\n", "]\n```"),
    "name-as-key": written_calls(f'{{"{NAME}": {ARGUMENTS}}}', "<calls>[", ", ", "]</calls>"),
    "name-in-tag": written_calls(f"<function={NAME}>{ARGUMENTS}</function>"),
    "ids": written_calls(f"<call>{{{{ call.id }}}}<name>{NAME}<args>{ARGUMENTS}</call>", "<calls>", "", "</calls>"),
    "numbers-from-one": written_calls(f'<call tool="{NAME}" index="{{{{ loop.index }}}}">{ARGUMENTS}</call>'),
    "typed-elements": written_calls(f'<invoke name="{NAME}">{TYPED}</invoke>', "<calls>\n", "\n", "\n</calls>"),
    "separated-elements": written_calls(f"<call>{NAME}({SEPARATED})</call>"),
}


def form_of_template(template: str, choice: Any = "auto") -> tuple[AnswerForm, Grammar]:
    tokenizer = make_tokenizer(template)
    form = ChatFormat.of(tokenizer).answer_form("", options(choice))
    assert form is not None
    return form, Grammar(form, tokenizer)


def rendered(template: str) -> str:
    """The calls as the template itself writes them."""
    calls = [
        {"id": f"call{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(CALLS)
    ]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Well.", "tool_calls": calls}]
    text = make_tokenizer(template).apply_chat_template(messages, tools=[WEATHER, NOW], tokenize=False)
    return str(text).rpartition("Well.")[2].rpartition("<|im_end|>")[0].strip()


@pytest.mark.parametrize("name", DERIVABLE)
def test_what_the_template_writes_is_allowed_and_read(name: str) -> None:
    template = chatml("", DERIVABLE[name])
    text = rendered(template)
    for choice in ("auto", "required"):
        form, grammar = form_of_template(template, choice)
        assert isinstance(form.format.calls, DerivedFormat)
        assert form.format.template_takes_tools
        assert grammar.accepts(text)
        for pieces in ([text], text):
            answer = read(form, pieces)
            assert (functions(answer), answer.text) == (CALLS, "")
        assert not grammar.begins(text.replace("get_weather", "get_wether"))
        assert not grammar.begins(text.replace("3", "[3]"))


@pytest.mark.parametrize("name", DERIVABLE)
def test_it_is_written_as_the_template_writes_it(name: str) -> None:
    template = chatml("", DERIVABLE[name])
    form, _ = form_of_template(template)
    written = form.format.calls.write_calls(CALLS)
    if name == "ids":
        assert written.count("call_") == 2
    elif name == "numbers-from-one":
        assert written.replace('index="1"', 'index="2"').replace('index="0"', 'index="1"') == rendered(template)
    else:
        assert written == rendered(template)


@pytest.mark.parametrize("schema", [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"enum": ["text", None]}, {}])
@pytest.mark.parametrize("value", ["text", None])
def test_where_frames_distinguish_strings_one_is_written_as_such_whatever_else_is_allowed(
    schema: Any, value: Any
) -> None:
    tool = {"type": "function", "function": {"name": "send", "parameters": {"properties": {"value": schema}}}}
    tokenizer = make_tokenizer(chatml("", DERIVABLE["typed-elements"]))
    form = ChatFormat.of(tokenizer).answer_form("", options("required", tools=[tool]))
    assert form is not None
    text = form.format.calls.write_calls([("send", {"value": value})])
    assert Grammar(form, tokenizer).accepts(text)
    assert functions(read(form, text)) == [("send", {"value": value})]


def test_ids_are_those_that_the_model_wrote() -> None:
    """Kimi K2's ids have the name and a number, and its template writes them alone."""
    form = form_of("kimi")
    text = form.format.calls.write_calls([("now", {}), ("now", {})])
    assert [call.id for call in read(form, text).tool_calls] == ["functions.now:0", "functions.now:1"]
    again = text.replace("functions.now:1", "functions.now:0")
    for repeated in (again, form.format.calls.write_calls([("now", {})]) * 2):
        one, other = read(form, repeated).tool_calls
        assert one.id == "functions.now:0"
        assert other.id not in ("", one.id)


def test_the_arguments_of_earlier_calls_that_are_no_objects_are_written() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{broken"}}
    form = ChatFormat.of(make_tokenizer(TEMPLATES["minimax"]))
    (message,) = form.as_template_messages([{"role": "assistant", "content": "", "tool_calls": [call]}], None)
    assert message["tool_calls"][0]["function"]["arguments"] == {"arguments": "{broken"}


ONE_CALL = "{% if message.tool_calls | length > 1 %}{{ raise_exception('one at once') }}{% endif %}"


def test_where_the_template_writes_one_call_an_answer_has_one() -> None:
    for calls in (
        ONE_CALL + DERIVABLE["name-in-tag"],
        DERIVABLE["name-in-tag"]
        .replace("endfor", "endfor")
        .replace("in message.tool_calls", "in message.tool_calls[:1]"),
    ):
        form, grammar = form_of_template(chatml("", calls), "required")
        assert isinstance(form.format.calls, DerivedFormat)
        write = form.format.calls.write_calls
        assert grammar.accepts(write(CALLS[:1]))
        assert not grammar.begins(write(CALLS))
        assert functions(read(form, write(CALLS[:1]))) == CALLS[:1]


def test_calls_may_end_an_answer_in_another_way_than_text_does() -> None:
    template = chatml("", DERIVABLE["name-in-tag"]).replace(
        "<|im_end|>\n{% endfor %}{% if add",
        "{{ '<|call|>' if message.tool_calls else '<|im_end|>' }}\n{% endfor %}{% if add",
    )
    form, grammar = form_of_template(template)
    assert isinstance(form.format.calls, DerivedFormat)
    assert form.format.calls.write_calls(CALLS[:1]).endswith("</function>")
    assert grammar.accepts(form.format.calls.write_calls(CALLS))


def test_a_template_that_insists_on_turns_and_takes_no_system_message_shows_its_form() -> None:
    check = (
        "{% for message in messages %}{% if (message.role in ('user', 'tool')) != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% endfor %}"
    )
    form, _ = form_of_template(check + chatml("", DERIVABLE["list"]))
    assert isinstance(form.format.calls, DerivedFormat)


@pytest.mark.parametrize(
    "calls",
    [
        "]<]m[>[<tool_call>\n" + written_calls(f'<call name="{NAME}">{TYPED}</call>'),
        DERIVABLE["list-in-tags"],
        DERIVABLE["name-in-tag"],
    ],
    ids=["MiniMax-M3", "Apriel-1.5", "Functionary"],
)
def test_signs_of_a_known_family_are_no_proof(calls: str) -> None:
    """Templates with Hermes' tag or Llama's token were taken for theirs, though they write calls in other forms."""
    form, _ = form_of_template(chatml("<tool_call> <|python_tag|>", calls))
    assert form.format.calls is not CALL_FORMATS["hermes"]
    assert form.format.calls is not CALL_FORMATS["llama3_json"]


UNDERIVABLE = {
    "none": "",
    "refused": "{% if message.tool_calls %}{{ raise_exception('no tools') }}{% endif %}",
    "name-alone": written_calls(f"<call>{NAME}</call>"),
    "bare-json": written_calls(JSON_CALL),
    "word": written_calls(f"call {NAME} with {ARGUMENTS}"),
    "words": written_calls(f"Action: {NAME}\nAction Input: {ARGUMENTS}\n"),
    "bare-list": written_calls(JSON_CALL, "[", ", ", "]"),
    "python": written_calls(
        f"{NAME}({{% for key, value in call.function.arguments | items %}}{{{{ key }}}}={VALUE}{{% endfor %}})",
        "[",
        "",
        "]",
    ),
    "quoted-by-one-character": written_calls(
        f"<call>{NAME}({{% for key, value in call.function.arguments | items %}}{{{{ key }}}}='{VALUE}'{{% endfor %}})</call>"
    ),
    "upper-case": written_calls(f"<call>{NAME}: {{{{ call.function.arguments | tojson | upper }}}}</call>"),
    "escaped": written_calls(
        f'<invoke name="{NAME}">{{% for key, value in call.function.arguments | items %}}'
        '<p name="{{ key }}">{{ value | string | e }}</p>{% endfor %}</invoke>'
    ),
    "arguments-before-name": written_calls(f'<call>{{"arguments": {ARGUMENTS}, "name": "{NAME}"}}</call>'),
    "id-after-arguments": written_calls(f"<call>{NAME}: {ARGUMENTS} ({{{{ call.id }}}})</call>"),
    "name-twice": written_calls(f" to={NAME}<call>{NAME}: {ARGUMENTS}</call>"),
    "nothing-after-name": written_calls(f"<call>{NAME}{ARGUMENTS}</call>"),
}


@pytest.mark.parametrize("name", UNDERIVABLE)
def test_what_is_not_sure_is_not_derived(name: str) -> None:
    found = ChatFormat.of(make_tokenizer(chatml("", UNDERIVABLE[name])))
    assert found.calls is CALL_FORMATS["json"]
    assert not found.template_takes_tools


@pytest.mark.parametrize(
    "result", ["{{ raise_exception('no tools') }}", "{% set message = {'role': '', 'content': ''} %}"]
)
def test_where_the_template_does_not_write_results_nothing_is_derived(result: str) -> None:
    template = chatml("", DERIVABLE["list"]).replace(
        "<|im_start|>{{ message.role }}",
        f"{{% if message.role == 'tool' %}}{result}{{% endif %}}<|im_start|>{{{{ message.role }}}}",
    )
    assert ChatFormat.of(make_tokenizer(template)).calls is CALL_FORMATS["json"]


def test_where_the_template_writes_calls_and_no_tools_these_are_described_with_its_form() -> None:
    template = chatml("", DERIVABLE["list"]).replace("{% if tools %}", "{% if false %}")
    form = ChatFormat.of(make_tokenizer(template))
    assert not form.template_takes_tools
    (system, _) = form.as_template_messages([{"role": "user", "content": "?"}], options())
    assert '<|tool_call|>[{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}]' in system["content"]


def test_where_text_is_marked_as_well_nothing_is_derived() -> None:
    """As in Kimi K3's template: what closes the text of an answer stands before the calls."""
    template = chatml("", DERIVABLE["list"]).replace("{{ message.content }}", "<text>{{ message.content }}</text>")
    assert ChatFormat.of(make_tokenizer(template)).calls is CALL_FORMATS["json"]
