"""Requests in Anthropic's form, translated into chats."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from pydantic import ValidationError
from support.messages_requests import BODY, IMAGE, QUESTION, RESULT, TEXT, USE

from radixkv.server.chat.turns import Turns
from radixkv.server.messages.request import MessagesRequest
from radixkv.server.messages.translation import as_chat_request


def test_an_empty_last_answer_is_part_of_no_prefix_that_stays_cached() -> None:
    messages = [QUESTION, {"role": "assistant", "content": ""}]
    body = MessagesRequest.model_validate({**BODY, "messages": messages, "cache_control": {"type": "ephemeral"}})
    chat, (breakpoint,) = as_chat_request(body)
    assert chat["messages"] == breakpoint.messages
    assert chat["messages"][-1]["role"] == "user"


def test_the_request_s_own_mark_is_kept_where_the_last_message_has_no_blocks() -> None:
    mark: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
    empty = {"role": "assistant", "content": []}
    marked = {"role": "user", "content": [{"type": "text", "text": QUESTION["content"], **mark}]}
    for question in (QUESTION, marked):
        body = MessagesRequest.model_validate({**BODY, **mark, "messages": [question, empty]})
        assert [point.messages for point in as_chat_request(body)[1]] == [[QUESTION]]


def chat_of(**fields: Any) -> dict[str, Any]:
    return as_chat_request(MessagesRequest.model_validate({**BODY, **fields}))[0]


def test_blocks_of_text_are_one_message_whatever_is_marked() -> None:
    """Appending thousands of blocks one by one used to take 2.5 s on the event loop for 7 MB of system prompt."""
    mark = {"cache_control": {"type": "ephemeral"}}
    blocks = [{"type": "text", "text": f"{number}", **(mark if number in (1, 2) else {})} for number in range(5)]
    body = MessagesRequest.model_validate(
        {
            **BODY,
            "system": blocks,
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "user", "content": [{"type": "text", "text": "you", **mark}]},
                {"role": "assistant", "content": blocks[3:]},
                {"role": "assistant", "content": [{"type": "text", "text": "!", **mark}]},
            ],
        }
    )
    chat, breakpoints = as_chat_request(body)
    assert chat["messages"] == [
        {"role": "system", "content": "0\n1\n2\n3\n4"},
        {"role": "user", "content": "Hi\nyou"},
        {"role": "assistant", "content": "34!"},
    ]
    assert [point.messages[-1]["content"] for point in breakpoints] == ["0\n1", "0\n1\n2", "Hi\nyou", "34!"]


def test_calls_are_put_into_their_message_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each used to copy all before it: 14,000 calls in one body held up the event loop for half a second."""
    begun = Mock(wraps=Turns._pop)
    monkeypatch.setattr(Turns, "_pop", lambda turns, role: begun(turns, role))
    calls = [{**USE, "id": f"{number}"} for number in range(50)]
    thought = {"type": "thinking", "thinking": "", "signature": "x"}
    for blocks in (calls, [block for call in calls for block in (thought, call)]):
        begun.reset_mock()
        (message,) = chat_of(messages=[{"role": "assistant", "content": blocks}])["messages"]
        assert [call["id"] for call in message["tool_calls"]] == [call["id"] for call in calls]
        assert begun.call_count == 1


def test_blocks_become_messages() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Köln"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "How is"}, {"type": "text", "text": "the weather?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I must ask.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me see."},
                call,
                {**call, "id": "t2", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Rain."}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no city", "is_error": True},
                {"type": "tool_result", "tool_use_id": "t3", "content": None},
                {"type": "text", "text": "And?"},
            ],
        },
        {"role": "user", "content": "Well?"},
    ]
    assert chat_of(messages=messages, system="Be kind.")["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "How is\nthe weather?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "I must ask.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}},
                {"id": "t2", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "Rain."},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no city"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "And?\nWell?"},
    ]


@pytest.mark.parametrize(
    "thought",
    [{"type": "thinking", "thinking": "", "signature": "x"}, {"type": "redacted_thinking", "data": "x"}],
    ids=["empty", "redacted"],
)
def test_texts_around_thinking_that_is_not_known_do_not_run_together(thought: dict[str, Any]) -> None:
    before, after = [{"type": "text", "text": text} for text in ("Let me check.", "Done.")]
    for mark in ({}, {"cache_control": {"type": "ephemeral"}}):
        answer = {"role": "assistant", "content": [thought, {**before, **mark}, thought, after, thought, USE]}
        first, second = chat_of(messages=[answer])["messages"]
        assert first == {"role": "assistant", "content": "Let me check."}
        assert (second["content"], len(second["tool_calls"])) == ("Done.", 1)
    # Others' texts around it are one turn, for templates that refuse two of one role in a row.
    lone = {"role": "assistant", "content": [thought]}
    assert chat_of(messages=[QUESTION, lone, QUESTION])["messages"] == [
        {"role": "user", "content": f"{QUESTION['content']}\n{QUESTION['content']}"}
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "f"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ],
)
def test_tools_and_the_choice_of_them(choice: dict[str, Any], expected: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {}}
    chat = chat_of(tools=[{"name": "f", "description": "It does.", "input_schema": schema}], tool_choice=choice)
    assert chat["tools"] == [
        {"type": "function", "function": {"name": "f", "description": "It does.", "parameters": schema}}
    ]
    assert {name: chat[name] for name in ("tool_choice", "parallel_tool_calls") if name in chat} == expected


def test_thinking_effort_and_schema() -> None:
    schema = {"type": "object"}
    output = {"effort": "max", "format": {"type": "json_schema", "schema": schema}}
    chat = chat_of(thinking={"type": "enabled", "budget_tokens": 2000}, output_config=output, top_k=5)
    assert chat["chat_template_kwargs"] == {"enable_thinking": True}
    assert chat["reasoning_effort"] == "max"
    assert chat["response_format"]["json_schema"]["schema"] == schema
    assert chat["top_k"] == 5
    older = chat_of(output_format=output["format"], output_config={"effort": "max"})
    assert older["response_format"] == chat["response_format"]
    with pytest.raises(ValueError, match="output_format: it is the older name"):
        chat_of(output_format=output["format"], output_config=output)
    assert chat_of(thinking={"type": "disabled"})["chat_template_kwargs"] == {"enable_thinking": False}


def test_what_coding_agents_send_is_accepted() -> None:
    mark = {"cache_control": {"type": "ephemeral", "scope": "global"}}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": {}}
    chat = chat_of(
        max_tokens=32_000,
        system=[{"type": "text", "text": "You are an agent."}, {"type": "text", "text": "Be careful.", **mark}],
        tools=[{"name": "Bash", "description": "It runs.", "input_schema": schema, "eager_input_streaming": True}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "Go on.", **mark}]}],
        metadata={"user_id": "user_1"},
        user_profile_id="uprof_1",
        workspace_id="wrkspc_1",
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        stream=True,
    )
    assert chat["max_completion_tokens"] == 32_000
    with pytest.raises(ValidationError, match="not supported"):
        chat_of(context_management={"edits": [{"type": "compact_20260112"}]})


def test_documents_of_text_and_search_results_are_read() -> None:
    """They were refused like images; in a tool's result, a note stood for their text."""
    source = {"type": "text", "media_type": "text/plain", "data": "Rain."}
    parts = {"type": "content", "content": [{"type": "text", "text": "Sun."}, {"type": "text", "text": "Wind."}]}
    texts = [{"type": "text", "text": "Fog."}]
    citations = {"citations": {"enabled": True}}
    content = [
        {"type": "document", "source": source, "title": "Bonn", "context": "today", **citations},
        {"type": "document", "source": parts},
        {"type": "document", "source": {**parts, "content": "Snow."}},
        {"type": "search_result", "source": "https://example.org", "title": "Rome", "content": texts, **citations},
    ]
    said = "Bonn\ntoday\nRain.\nSun.\nWind.\nSnow.\nRome\nhttps://example.org\nFog."
    messages = [{"role": "user", "content": [*content, {**RESULT, "content": content}]}]
    assert chat_of(messages=messages)["messages"] == [
        {"role": "user", "content": said},
        {"role": "tool", "tool_call_id": "one", "content": said},
    ]
    with pytest.raises(ValueError, match="a block of type 'search_result' is user's, got role 'assistant'"):
        chat_of(messages=[{"role": "assistant", "content": content[-1:]}])


def test_marks_within_documents_and_results_keep_what_is_before_them() -> None:
    """They kept nothing."""
    mark: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": "Sun.", **mark}, {"type": "text", "text": "Wind."}]
    found = {"type": "search_result", "source": "https://example.org", "title": "Rome", "content": parts}
    document = {"type": "document", "source": {"type": "content", "content": parts}, "title": "Bonn", **mark}
    result = {**RESULT, "content": [{**IMAGE, **mark}, found, TEXT], "is_error": True}
    note, said = "Error: [image left out: this model reads text only]", "Rome\nhttps://example.org\nSun."
    for blocks, role, marked, last in (
        ([found, document], "user", [said, f"{said}\nWind.\nBonn\nSun.", f"{said}\nWind.\nBonn\nSun.\nWind."], ""),
        ([result], "tool", [note, f"{note}\n{said}"], f"\nWind.\n{TEXT['text']}"),
    ):
        body = MessagesRequest.model_validate({**BODY, "messages": [{"role": "user", "content": blocks}]})
        chat, breakpoints = as_chat_request(body)
        turns = [point.messages for point in breakpoints]
        assert [[(turn["role"], turn["content"]) for turn in each] for each in turns] == [
            [(role, text)] for text in marked
        ]
        assert chat["messages"][-1]["content"] == f"{marked[-1]}{last}"
    # They count like all others.
    with pytest.raises(ValueError, match="at most 4"):
        chat_of(messages=[{"role": "user", "content": [document, document, found]}])


@pytest.mark.parametrize(
    "source",
    [
        {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
        {"type": "url", "url": "https://example.org/a.pdf"},
        {"type": "content", "content": [TEXT, IMAGE]},
    ],
)
def test_documents_that_are_no_text_are_refused_where_the_user_can_leave_them_out(source: dict[str, Any]) -> None:
    document = {"type": "document", "source": source, "title": "T", "cache_control": {"type": "ephemeral"}}
    with pytest.raises(ValueError, match=r"^messages.0.content.0.document: expected text, which is all"):
        chat_of(messages=[{"role": "user", "content": [document]}])
    result = {**RESULT, "content": [TEXT, {**IMAGE, "transformations": None}, document]}
    (message,) = chat_of(messages=[{"role": "user", "content": [result]}])["messages"]
    assert message["content"] == (
        "What is this?\n[image left out: this model reads text only]\n[document left out: this model reads text only]"
    )


def test_examples_of_a_tool_s_input_are_part_of_its_schema() -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}, "input_examples": [{"city": "Bonn"}]}
    (described,) = chat_of(tools=[tool])["tools"]
    assert described["function"]["parameters"] == {"type": "object", "examples": [{"city": "Bonn"}]}


def test_what_other_servers_put_into_an_answer_is_no_part_of_the_prompt() -> None:
    citation = {"type": "char_location", "cited_text": "x", "document_index": 0}
    blocks = [
        {"type": "thinking", "thinking": "", "signature": "x"},
        {"type": "text", "text": "Rain", "citations": [citation]},
        {"type": "text", "text": ".", "citations": None},
    ]
    messages = [QUESTION, {"role": "assistant", "content": blocks}]
    assert chat_of(messages=messages)["messages"] == [QUESTION, {"role": "assistant", "content": "Rain."}]
