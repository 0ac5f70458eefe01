"""Requests of the Responses API, translated into chats, and what models write, into items and events."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from support.chat_templates import STRICT_TURNS, TEMPLATES, make_tokenizer, text_interface
from support.response_requests import EVENT

from radixkv.server.chat.messages import as_messages
from radixkv.server.chat.translated_chat import translate
from radixkv.server.responses.output import Output
from radixkv.server.responses.request import ResponseRequest
from radixkv.server.responses.translation import (
    FIELD_NAMES,
    as_chat_request,
    input_messages,
    instructed,
    output_messages,
)
from radixkv.tools.pieces import ReasoningPiece, TextPiece, ToolCallArguments, ToolCallBegin


def test_what_openai_s_client_parsed_is_sent_back() -> None:
    """Its dumps have fields of their own, which used to be refused."""
    dumped = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "parsed_arguments": {"x": 1}}
    answer = {"type": "output_text", "text": "{}", "annotations": [], "parsed": {"colour": "red"}}
    question = {"role": "user", "content": "And?"}
    messages = input_messages(
        ResponseRequest.model_validate(
            {"input": [{"role": "assistant", "content": [answer]}, {**dumped, "async_": None}, question]}
        ).input
    )
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert messages == [{"role": "assistant", "content": "{}", "tool_calls": [call]}, question]
    for name in ("async", "async_"):
        with pytest.raises(ValidationError, match="not supported"):
            ResponseRequest.model_validate({"input": [{**dumped, name: True}]})


def test_what_other_servers_put_into_an_answer_is_no_part_of_the_prompt() -> None:
    """A conversation that another server had begun used to be refused."""
    question = {"role": "user", "content": "Which?"}
    citation = {"type": "url_citation", "url": "https://example.org", "title": "T", "start_index": 0, "end_index": 3}
    text = {"type": "output_text", "text": "Red.", "annotations": [citation], "logprobs": [{"token": "Red"}]}
    items = [
        question,
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [text]},
    ]
    include = ["reasoning.encrypted_content", "web_search_call.action.sources", "file_search_call.results"]
    body = ResponseRequest.model_validate({"input": items, "include": include})
    assert input_messages(body.input) == [question, {"role": "assistant", "content": "Red."}]


def test_answers_around_reasoning_without_text_do_not_run_together() -> None:
    before, after = [{"role": "assistant", "content": text} for text in ("Let me check.", "Done.")]
    body = ResponseRequest.model_validate(
        {"input": [before, {"type": "reasoning", "id": "rs_1", "summary": []}, after]}
    )
    assert input_messages(body.input) == [before, after]


def test_items_become_messages() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "How is"}, {"type": "input_text", "text": "it?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": None}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "message", "role": "assistant", "content": "Done."},
        {"role": "developer", "content": "Be brief."},
    ]
    assert input_messages(ResponseRequest.model_validate({"input": items}).input) == [
        {"role": "user", "content": "How is\nit?"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "Let me see.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
                {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "assistant", "content": "Done."},
        {"role": "system", "content": "Be brief."},
    ]


def test_successive_texts_of_one_role_are_one_message() -> None:
    """Codex begins with two messages of the developer and two of the user, which templates of strict turns refused."""
    roles = {"a": "developer", "b": "developer", "c": "user", "d": "user", "e": "assistant", "f": "assistant"}
    items = [{"role": role, "content": text} for text, role in roles.items()]
    body = ResponseRequest.model_validate({"input": items, "instructions": "Be brief."})
    first = instructed(body, input_messages(body.input))
    assert first == [
        {"role": "system", "content": "Be brief.\na\nb"},
        {"role": "user", "content": "c\nd"},
        {"role": "assistant", "content": "ef"},
    ]
    tokenizer = make_tokenizer(STRICT_TURNS["gemma3"])
    assert "Be brief.\na\nb\n\nc\nd" in tokenizer.apply_chat_template(first, tokenize=False)


def test_what_continues_a_response_without_output_goes_on_with_the_question() -> None:
    earlier = [{"role": "user", "content": "Hi"}]
    assert input_messages("Well?", earlier) == [{"role": "user", "content": "Hi\nWell?"}]
    assert earlier == [{"role": "user", "content": "Hi"}]  # other responses may continue it, too


@pytest.mark.parametrize("max_tokens", [None, 300, 5000])
def test_what_is_left_of_a_truncated_conversation_are_its_head_and_whole_turns(max_tokens: int | None) -> None:
    loaded = text_interface(TEMPLATES["hermes"])
    items: list[dict[str, Any]] = [{"role": "developer", "content": "Read."}]
    for number in range(10, 60):
        items += [
            {"role": "user", "content": f"{number}"},
            {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{number}", "output": "A page."},
        ]
    options = {"instructions": "Be brief.", "truncation": "auto", "max_output_tokens": max_tokens}
    body = ResponseRequest.model_validate({"input": items, **options})
    chat = translate(as_chat_request(body, input_messages(body.input)), FIELD_NAMES)
    prompt = chat.as_prompt(as_messages(chat.messages), chat.chat_options, loaded)
    assert prompt.text is not None
    head, *turns = prompt.text.split("<|im_start|>user\n")
    assert head == "<|im_start|>system\nBe brief.\nRead.<|im_end|>\n"
    assert [turn[:2] for turn in turns] == [f"{number}" for number in range(60 - len(turns), 60)]
    assert all(turn.index("<tool_call>") < turn.index("A page.") for turn in turns)
    room = loaded.max_model_len - min(max_tokens or 1, loaded.max_model_len // 2)
    assert 0.4 * room < len(prompt.token_ids) <= room


def test_pieces_become_items_and_their_events() -> None:
    output = Output()
    pieces = [
        ReasoningPiece("Hm."),
        TextPiece("Let "),
        TextPiece("me see."),
        ToolCallBegin(0, "c1", "f"),
        ToolCallArguments(0, '{"x": '),
        ToolCallArguments(0, "1}"),
        ToolCallBegin(1, "c2", "f"),
        ToolCallArguments(1, '{"x'),
    ]
    events = [event.model_dump() for piece in pieces for event in output.add(piece)]
    events += [event.model_dump() for event in output.end("incomplete")]
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [(event["output_index"], event["type"].removeprefix("response.")) for event in events] == [
        *[(0, "output_item.added"), (0, "content_part.added"), (0, "reasoning_text.delta"), (0, "reasoning_text.done")],
        *[(0, "content_part.done"), (0, "output_item.done")],
        *[(1, "output_item.added"), (1, "content_part.added"), (1, "output_text.delta"), (1, "output_text.delta")],
        *[(1, "output_text.done"), (1, "content_part.done"), (1, "output_item.done")],
        *[(2, "output_item.added"), *[(2, "function_call_arguments.delta")] * 2, (2, "function_call_arguments.done")],
        (2, "output_item.done"),
        *[(3, "output_item.added"), (3, "function_call_arguments.delta"), (3, "function_call_arguments.done")],
        (3, "output_item.done"),
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in done] == ["completed", "completed", "completed", "incomplete"]
    assert done == [item.model_dump() for item in output.items]
    assert output_messages(output.items) == [
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "Let me see.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
                {"id": "c2", "type": "function", "function": {"name": "f", "arguments": '{"x'}},
            ],
        }
    ]
