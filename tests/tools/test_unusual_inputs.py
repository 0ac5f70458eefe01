"""Tools and earlier calls that are unusual, but that clients send and models write."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.chat_templates import text_interface

from radixkv import SamplingParams
from radixkv.prompts import ChatOptions, as_chat_prompts, as_template_message, render_chat, with_answer_form
from radixkv.tools.definitions import as_tool_options

# In the manner of Qwen3-Coder's.
WRITES_EACH_ARGUMENT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call><function={{ call.function.name }}>"
    "{% for key, value in call.function.arguments | items %}<parameter={{ key }}>{{ value }}</parameter>{% endfor %}"
    "</function></tool_call>{% endfor %}|{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if effort %}{{ 'Effort: ' + effort }}{% endif %}"
)


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


def test_a_message_that_ends_in_calls_is_not_continued() -> None:
    """Its calls were dropped without a word."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Go."},
        as_template_message({"role": "assistant", "content": "I look.", "tool_calls": [call]}),
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


@pytest.mark.parametrize("name", ["get weather", "weather\n", "a>b", "<f", "f[ARGS]"])
def test_a_name_that_some_form_of_calls_cannot_hold_is_refused(name: str) -> None:
    """Its calls were read as text, or as those of a tool that there is not."""
    message = "^tools: expected a name without white space, .* got " + re.escape(repr(name))
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
    function, mark = {"name": "f", "description": "d"}, {"cache_control": {"type": "ephemeral"}}
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
