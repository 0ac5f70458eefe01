"""Tools and earlier calls that are unusual, but that clients send and models write."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.chat_templates import TEMPLATES, make_tokenizer, text_interface

from radixkv import SamplingParams
from radixkv.prompts import ChatOptions, as_chat_prompts, as_template_message, render_chat, with_answer_form
from radixkv.tools.chat_format import CALL_FORMATS, ChatFormat
from radixkv.tools.definitions import as_tool_options

# In the manner of Qwen3-Coder's.
WRITES_EACH_ARGUMENT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call><function={{ call.function.name }}>"
    "{% for key, value in call.function.arguments | items %}<parameter={{ key }}>{{ value }}</parameter>{% endfor %}"
    "</function></tool_call>{% endfor %}|{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if effort %}{{ 'Effort: ' + effort }}{% endif %}"
)
# In the manner of gpt-oss's.
NEEDS_DESCRIPTIONS = (
    "<|channel|><|message|>{% for tool in tools or [] %}// {{ 'It ' + tool.function.description }}\n{% endfor %}"
    "{% for message in messages %}{% if message.tool_calls and message.content and message.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking in an assistant message with tool calls!') }}{% endif %}"
    "{{ message.role }}: {{ message.thinking }}{{ message.content }}|{% endfor %}"
)
# In the manner of Seed-OSS's, and of Qwen3's first one.
NEEDS_PROPERTIES = (
    "{% for tool in tools or [] %}{{ tool.function.name }}({% for name in tool.function.parameters.properties.keys() %}"
    "{{ name }}{{ '' if name in tool.function.parameters.required else '?' }},{% endfor %}) {% endfor %}"
    "{% for message in messages %}{{ message.role + ': ' + message.content }}|{% endfor %}"
)
HERMES = f"{{# <tool_call> #}}{NEEDS_PROPERTIES}"
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"a": 1, "b": "x"}', "<parameter=a>1</parameter><parameter=b>x</parameter>"),
        ('{"a": 1, "b', '<parameter=arguments>{"a": 1, "b</parameter>'),
        ("[1]", "<parameter=arguments>[1]</parameter>"),
    ],
)
def test_arguments_that_are_no_object_are_written_as_one(arguments: str, written: str) -> None:
    """A call that was cut in its arguments, sent back, made Qwen3-Coder's template fail, and the conversation with it."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Go."},
        as_template_message({"role": "assistant", "content": None, "tool_calls": [call]}),
    ]
    text = render_chat(messages, text_interface(WRITES_EACH_ARGUMENT))
    assert f"<function=f>{written}</function>" in text


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_calls_without_text_are_written_by_templates_that_look_into_the_text(content: dict[str, Any]) -> None:
    """Qwen3's and Devstral's first templates do, and transformers leaves out what is null: the conversation was refused."""
    message = as_template_message({"role": "assistant", "tool_calls": [CALL], **content})
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert render_chat([message], text_interface(HERMES)) == f"assistant: {call}|"  # which this template leaves out


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_beside_text_and_calls_is_left_out_where_the_template_refuses_it(name: str) -> None:
    """It was given under the name of the other templates, and transformers added the one that this one knows."""
    said = {"role": "assistant", "content": "I look.", name: "Hm."}
    called = {**said, "tool_calls": [CALL]}
    messages = [as_template_message(message) for message in (said, called, {**called, "content": None})]
    text = render_chat(messages, text_interface(NEEDS_DESCRIPTIONS))
    assert text == "<|channel|><|message|>assistant: Hm.I look.|assistant: I look.|assistant: Hm.|"


def test_where_the_template_writes_one_call_of_a_message_each_has_one_and_its_result() -> None:
    """gpt-oss' template left out all but the first, and wrote their results as those of the first."""
    calls = [{**CALL, "id": f"call{number}"} for number in range(3)]
    results = [
        {"role": "tool", "tool_call_id": f"call{number}", "content": f"result {number}"} for number in (2, 0, 7, 1)
    ]
    said = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": calls}
    form = ChatFormat.of(make_tokenizer(NEEDS_DESCRIPTIONS))
    written = form.as_template_messages([said, *results, {"role": "user", "content": "?"}], None)
    shown = [[call["id"] for call in message.get("tool_calls", ())] or message["content"] for message in written]
    assert shown == [["call0"], "result 0", ["call1"], "result 1", ["call2"], "result 2", "result 7", "?"]
    assert [message.get("thinking") for message in written] == ["Hm.", *[None] * 7]


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        ({}, "f()"),
        ({"description": None, "parameters": None}, "f()"),
        ({"parameters": {"type": "object"}}, "f()"),
        ({"parameters": {"properties": None}}, "f()"),
        ({"parameters": {"properties": {"x": {}}, "type": "object"}}, "f(x?,)"),
        ({"parameters": {"properties": {"x": {}}, "required": None}}, "f(x?,)"),
        ({"parameters": {"properties": {"x": {}}, "required": ["x"]}}, "f(x,)"),
    ],
)
def test_what_a_tool_leaves_out_is_there_for_templates_that_need_it(function: dict[str, Any], signature: str) -> None:
    """gpt-oss's refused a tool without a description, and Seed-OSS's one without properties."""
    options = ChatOptions(
        tools=as_tool_options([{"type": "function", "function": {"name": "f", **function}}], None, None)
    )
    messages = [{"role": "user", "content": "Go."}]
    described = render_chat(messages, text_interface(NEEDS_DESCRIPTIONS), options)
    assert described == "<|channel|><|message|>// It \nuser: Go.|"
    assert render_chat(messages, text_interface(HERMES), options) == f"{signature} user: Go.|"


def test_a_tool_that_leaves_nothing_out_is_shown_as_it_is_given() -> None:
    """In another order, the prompt would be another one, of which no prefix is cached."""
    parameters = {"required": ["x"], "properties": {"x": {"type": "string"}}, "type": "object"}
    tool = {"function": {"parameters": parameters, "description": "d", "name": "f"}, "type": "function"}
    options = as_tool_options([tool], None, None)
    assert options is not None
    assert json.dumps(options.definitions) == json.dumps([tool])


def test_calls_that_begin_with_another_tag_are_not_taken_for_qwen3_coder_s() -> None:
    """Told of the tools by Seed-OSS's template, the model would begin calls with a tag that was not looked for."""
    found = ChatFormat.of(make_tokenizer(f"{{# <seed:tool_call><function=f><parameter=x> #}}{NEEDS_PROPERTIES}"))
    assert found.calls is CALL_FORMATS["json"]
    assert not found.template_takes_tools
    assert ChatFormat.of(make_tokenizer(TEMPLATES["qwen3_coder"])).calls is CALL_FORMATS["qwen3_coder"]


def test_a_message_that_ends_in_calls_is_not_continued() -> None:
    """Its calls were dropped without a word."""
    messages = [
        {"role": "user", "content": "Go."},
        as_template_message({"role": "assistant", "content": "I look.", "tool_calls": [CALL]}),
    ]
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(ValueError, match="continue_final_message: the last message ends in tool calls, not in text"):
        render_chat(messages, text_interface(WRITES_EACH_ARGUMENT), options)


def test_what_a_template_cannot_compute_with_is_named() -> None:
    """The error was jinja's alone, and named no argument."""
    expected = "messages, tools, chat_template_kwargs: the chat template refuses them: can only concatenate str"
    with pytest.raises(ValueError, match=expected):
        render_chat(
            [{"role": "user", "content": "Go."}],
            text_interface(WRITES_EACH_ARGUMENT),
            ChatOptions(chat_template_kwargs={"effort": 3}),
        )


@pytest.mark.parametrize("value", ["false", "true", 0, 1, []])
def test_a_switch_that_is_no_boolean_is_refused(value: Any) -> None:
    """Only False and True themselves counted: "false" allowed several calls, and a schema was not strict with "true"."""
    expected = re.escape(f"parallel_tool_calls: expected a boolean or None, got {value!r}")
    with pytest.raises(TypeError, match=expected):
        as_tool_options(None, None, value)
    function = {"name": "f", "strict": value}
    expected = re.escape(f"tools: expected strict of 'f' to be a boolean or None, got {value!r}")
    with pytest.raises(TypeError, match=expected):
        as_tool_options([{"type": "function", "function": function}], None, None)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ({}, "expected a function with a name, got {}"),
        ({"name": ""}, "expected a function with a name, got {'name': ''}"),
        ({"name": "f", "parameters": "{}"}, "expected the parameters of 'f' to be a JSON schema, got '{}'"),
    ],
)
def test_a_function_without_a_name_or_a_schema_is_refused(function: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"tools: {message}")):
        as_tool_options([{"type": "function", "function": function}], None, None)


def test_null_says_nothing_about_a_tool_s_parameters() -> None:
    """Anthropic's client has optional properties, and sends null for them; the request was refused."""
    parameters: dict[str, Any] = {"type": "object", "properties": None, "required": None}
    options = as_tool_options([{"type": "function", "function": {"name": "f", "parameters": parameters}}], None, None)
    assert options is not None
    assert json.dumps(options.tools["f"].parameters) == '{"type": "object", "properties": {}}'


@pytest.mark.parametrize(
    "name", ["get weather", "weather\n", "a>b", "<f", "f[ARGS]", "f{", "f(x)", 'a"b', "a\\b", "f\ue000"]
)
def test_a_name_that_some_form_of_calls_cannot_hold_is_refused(name: str) -> None:
    """Its calls were read as text, or as those of a tool that there is not."""
    message = "^tools: expected a name without white space, brackets, .* got " + re.escape(repr(name))
    with pytest.raises(ValueError, match=message):
        as_tool_options([{"type": "function", "function": {"name": name}}], None, None)


def test_a_schema_that_is_nested_too_deeply_is_refused_by_its_name() -> None:
    """It ended in a RecursionError, and a server answered that it had failed."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(600):
        schema = {"type": "array", "items": schema}
    parameters = {"type": "object", "properties": {"x": schema}}
    options = as_tool_options([{"type": "function", "function": {"name": "f", "parameters": parameters}}], None, None)
    chat_format = text_interface(WRITES_EACH_ARGUMENT).chat_format
    assert chat_format is not None
    with pytest.raises(ValueError, match=r"^tools: expected fewer lists and objects within each other$"):
        with_answer_form(SamplingParams(), chat_format.answer_form("", options))


def test_marks_for_a_cache_are_not_shown_to_a_model() -> None:
    """A template that writes tools as JSON wrote the mark, too, and the prompt was another one than a server's."""
    function: dict[str, Any] = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    mark = {"cache_control": {"type": "ephemeral"}}
    messages, loaded = [{"role": "user", "content": "Go."}], text_interface(WRITES_EACH_ARGUMENT)
    prompts = {
        render_chat(messages, loaded, ChatOptions(tools=as_tool_options([tool], None, None)))
        for tool in (
            {"type": "function", "function": function},
            {**mark, "type": "function", "function": function},
            {"type": "function", "function": {**mark, **function}},
        )
    }
    assert prompts == {"user: Go.|" + json.dumps([{"type": "function", "function": function}])}


@pytest.mark.parametrize("role", ["assitant", "Assistant", "sytem", "usr", "users", "tol"])
def test_a_misspelt_role_is_refused(role: str) -> None:
    """Many templates write any role, and others leave its message out; a server refused it, and `LLM.chat` did not."""
    with pytest.raises(
        ValueError, match=rf"^messages: expected role .* got '{role}'; did you mean (assistant|system|user|tool)\?$"
    ):
        render_chat([{"role": role, "content": "Hi."}], text_interface(WRITES_EACH_ARGUMENT))


@pytest.mark.parametrize(
    "role", ["ipython", "function", "observation", "tools", "model", "narrator", "user2", "assistant_1", ""]
)
def test_other_roles_are_the_template_s(role: str) -> None:
    assert render_chat([{"role": role, "content": "Hi."}], text_interface(WRITES_EACH_ARGUMENT)) == f"{role}: Hi.|"


@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_role_that_the_template_names_is_no_misspelt_one(quote: str) -> None:
    """A template for "User" and "Assistant" could be used with transformers and vLLM, and not here."""
    names_it = (
        f"{{% for message in messages if message.role == {quote}User{quote} %}}{{{{ message.content }}}}{{% endfor %}}"
    )
    loaded = text_interface(names_it)
    (prompt,) = as_chat_prompts([{"role": "User", "content": "Hi."}], loaded)
    assert prompt.text == "Hi."
    with pytest.raises(ValueError, match="did you mean user"):
        render_chat([{"role": "Usr", "content": "Hi."}], loaded)
