"""What other projects' clients send, as recorded from their sources, and what is said of impossible values."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import httpx
import pytest
from support.client_payloads import CHAT, TEXT, post
from support.in_process_server import served
from support.replica_servers import tiny_llm

from radixkv import LLM
from radixkv.model.tokenizer import with_chat_template
from radixkv.prompts import Prompt, as_chat_prompts, as_template_message
from radixkv.sampling.grammar.compiler import GrammarCompiler
from radixkv.server.chat.messages import ChatMessage, as_messages
from radixkv.server.chat.request import ChatCompletionRequest
from radixkv.server.completions import CompletionRequest


async def test_lm_eval_local_completions(default_llm: LLM) -> None:
    """lm-eval 0.4.13, `lm_eval/models/openai_completions.py`: loglikelihood (batches of token ids), generate_until."""
    tokenizer = default_llm.get_tokenizer()
    context, continuation = "One, two, three,", " four, five"
    whole = tokenizer(context + continuation)["input_ids"]
    length = len(tokenizer(context)["input_ids"])
    async with served(default_llm) as client:
        body = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True, "model": "model"}
        answer = await post(client, "/v1/completions", {**body, "prompt": [whole, whole[:-2]]})
        for choice, tokens in zip(answer["choices"], (whole, whole[:-2]), strict=True):
            chosen, top = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
            assert len(chosen) == len(top) == len(tokens) + 1
            assert chosen[0] is None
            # As lm-eval decides whether a continuation is the greedy one: here it is.
            assert all(own == max(t.values()) for own, t in zip(chosen[length:-1], top[length:-1], strict=True))
        generate = {"model": "model", "max_tokens": 12, "temperature": 0, "stop": ["five", "<|im_end|>"], "seed": 1234}
        (choice,) = (await post(client, "/v1/completions", {**generate, "prompt": [context]}))["choices"]
        assert choice["text"] == " four, "
        chat = {**generate, "messages": CHAT["messages"], "stop": ["<|im_end|>"]}
        assert (await post(client, "/v1/chat/completions", chat))["choices"][0]["message"]["content"]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_what_the_assistant_thought_has_two_names(name: str) -> None:
    """vLLM 0.32 writes ``reasoning``, and clients send its answers back."""
    message = ChatMessage.model_validate({"role": "assistant", "content": "Yes.", name: "Hm."})
    (written,) = as_messages([message])
    assert as_template_message(written) == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert "Hm." in message.texts


PRINTS_ALL_FIELDS = (
    "{% for m in messages %}{% for key, value in m.items() %}{{ key }}={{ value | tojson }}|{% endfor %}\n{% endfor %}"
)


def called(arguments: str) -> dict[str, Any]:
    unread = {"provider_specific_fields": {"thought_signature": "x"}}
    function = {"arguments": arguments, "name": "f", "parsed_arguments": {"a": 1}, **unread}
    extra = {"extra_content": {"google": {"thought_signature": "x"}}}
    return {"id": "c1", "function": function, "type": "function", "index": 0, **unread, **extra}


@pytest.mark.parametrize("template", [None, PRINTS_ALL_FIELDS])
def test_a_conversation_has_one_prompt_in_a_program_and_over_http(llm: LLM, template: str | None) -> None:
    """The server prepared messages in its own way, and then as programs' are: JSON within JSON was read twice."""
    conversations: list[list[dict[str, Any]]] = [
        [{"role": "developer", "content": [{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Or not."}]}],
        [{"role": "user", "content": "Hi", "name": "Ann"}],
        [{"role": "assistant", "content": None, "refusal": "No."}, {"role": "user", "content": "Why?"}],
        [
            {
                "role": "assistant",
                "content": [{"type": "refusal", "refusal": "No."}],
                "annotations": [],
                "parsed": {"x": 1},
            }
        ],
        [{"role": "assistant", "content": "", "tool_calls": [], "reasoning": "Hm.", "audio": None, "type": "message"}],
        [{"role": "assistant", "content": None, "reasoning": "Hm.", "reasoning_content": "So."}],
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Hello"},
                ],
            }
        ],
        [
            {"role": "user", "content": "Hi", "cache_control": {"type": "ephemeral"}},
            {
                "role": "assistant",
                "content": "Hello",
                "provider_specific_fields": {"refusal": None},
                "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}],
                "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}],
            },
        ],
        *(
            [
                {"role": "assistant", "content": content, "tool_calls": [called(arguments)], "function_call": None},
                {"tool_call_id": "c1", "role": "tool", "name": "f", "content": None},
            ]
            for content in (None, "", "Well.")
            for arguments in ('{"a": "[1]"}', '"{\\"a\\": 1}"', '{"a": 1', "")
        ),
    ]
    loaded = with_chat_template(llm.engine.loaded, template)
    for messages in conversations:
        body = ChatCompletionRequest.model_validate({"messages": messages})
        (in_program,) = as_chat_prompts(messages, loaded)
        over_http = body.as_prompt(as_messages(body.messages), body.chat_options, loaded)
        assert over_http == in_program
    text = as_chat_prompts(conversations[2], loaded)[0].text or ""
    assert "No." in text


def test_parts_of_thinking_are_what_the_assistant_thought() -> None:
    """LiteLLM sends them to vLLM; Claude Code was refused, through it, once the model had thought."""
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    parts = [thinking, {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Yes."}]
    message = ChatMessage.model_validate({"role": "assistant", "content": parts})
    (written,) = as_messages([message])
    assert as_template_message(written) == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    alone = {"role": "assistant", "content": [thinking], "tool_calls": [called("{}")]}
    assert as_template_message(alone)["content"] == ""
    with pytest.raises(ValueError, match="expected content to be a string or a list of text parts"):
        as_template_message({"role": "user", "content": parts})


async def test_guidellm_and_vllm_bench_serve(llm: LLM) -> None:
    """guidellm 0.8.1, `backends/openai/request_handlers.py`; vLLM, `benchmarks/lib/endpoint_request_func.py`."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    guidellm = {"model": "model", "stream": True, "stream_options": usage, "stop": None, "ignore_eos": True}
    bench = {"model": "model", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]

    async with served(llm) as client:
        for path, body in (
            ("/v1/completions", {**guidellm, "prompt": "Hi", "max_tokens": 4}),
            ("/v1/chat/completions", {**guidellm, "messages": parts, "max_completion_tokens": 4}),
        ):
            *chunks, last = await post(client, path, body)
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts)
            assert counts[-1] == 4
            assert all(chunk["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] > 0 for chunk in chunks)
            assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)
        for path, body in (
            (
                "/v1/completions",
                {**bench, "prompt": "Hi", "max_tokens": 4, "repetition_penalty": 1.0, "logprobs": None},
            ),
            ("/v1/chat/completions", {**bench, "messages": parts, "max_completion_tokens": 4}),
        ):
            *chunks, last = await post(client, path, body)
            assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)
            assert last["usage"]["completion_tokens"] == 4


async def test_messages_as_other_services_return_them(llm: LLM) -> None:
    plain = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    sent = [
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}],
        },
        {
            "role": "assistant",
            "content": "Hello",
            "annotations": [],
            "refusal": None,
            "audio": None,
            "tool_calls": [],
            "provider_specific_fields": {"refusal": None},
        },
        {"role": "user", "content": "Bye", "type": "message", "cache_control": {"type": "ephemeral"}},
    ]
    async with served(llm) as client:
        tokens = [(await post(client, "/tokenize", {"messages": messages}))["tokens"] for messages in (plain, sent)]
        assert tokens[0] == tokens[1]

        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        described = [
            await post(client, "/tokenize", {"messages": plain, "tools": [{**tool, **mark}]})
            for mark in ({}, {"cache_control": {"type": "ephemeral"}})
        ]
        assert described[0]["tokens"] == described[1]["tokens"]


@pytest.mark.parametrize(
    "refused",
    [
        {"content": None, "refusal": "I will not."},
        {"content": [{"type": "refusal", "refusal": "I will not."}]},
        {"content": [{"type": "text", "text": "I will not."}], "refusal": None},
    ],
)
async def test_refusals_of_other_servers_are_what_the_assistant_said(llm: LLM, refused: dict[str, Any]) -> None:
    def asked(answer: dict[str, Any]) -> dict[str, Any]:
        question = {"role": "user", "content": "Hi"}
        return {"messages": [question, {"role": "assistant", **answer}, question]}

    async with served(llm) as client:
        plain = await post(client, "/tokenize", asked({"content": "I will not."}))
        assert (await post(client, "/tokenize", asked(refused)))["tokens"] == plain["tokens"]


async def test_the_longest_prompt_leaves_room_for_the_default_answer(default_tokenizer: Any) -> None:
    async with served(tiny_llm(default_tokenizer, max_model_len=400)) as client:
        long = {"prompt": " word" * 500, "truncate_prompt_tokens": -1, "ignore_eos": True}
        usage = (await post(client, "/v1/completions", long))["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (400 - 16, 16)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "use_beam_search": True}, "prompt_logprobs"),
        ({"bad_words": ["x"], "use_beam_search": True}, "bad_words"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "guided_regex": "a"}, "allowed_token_ids"),
        ({"stop_token_ids": list(range(1025))}, "stop_token_ids"),
        ({"logit_bias": {f"{i}": 1 for i in range(1025)}}, "logit_bias"),
        ({"request_id": ""}, "request_id"),
        ({"guided_choice": ["x" * 130_000]}, "guided_choice"),
        ({"guided_json": {"items": {"uniqueItems": True}}}, "guided_json"),
    ],
)
async def test_impossible_values_are_named(llm: LLM, fields: dict[str, Any], param: str) -> None:
    async with served(llm) as client:
        for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
            response = await client.post(path, json={**body, "max_tokens": 1, **fields})
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == param


async def test_a_text_that_no_tokens_of_the_model_can_hold_is_refused_even_if_it_is_to_be_truncated(
    default_tokenizer: Any,
) -> None:
    length = max(len(token) for token in default_tokenizer.get_vocab())
    async with served(tiny_llm(default_tokenizer, max_model_len=16)) as client:
        for num_characters, status in ((16 * length, 200), (16 * length + 1, 400)):
            body = {"prompt": "a" * num_characters, "truncate_prompt_tokens": 5, "max_tokens": 1}
            answer = await post(client, "/v1/completions", body, status)
        message = (
            f"prompt: at least 17 tokens > 16 maximum: {num_characters} characters, and a token has at most {length}"
        )
        assert answer["error"]["message"].startswith(f"{message}; texts longer than that are not truncated")


def test_a_truncated_prompt_leaves_room_for_the_answer() -> None:
    prompt = Prompt(list(range(9000)), "text")
    for limit, max_tokens, expected in (
        (-1, 4, 8188),
        (-1, None, 8191),
        (-1, 5000, 4096),
        (-1, 9000, 4096),
        (7, 4, 7),
        (None, 4, 9000),
        (9001, 4, 9000),
    ):
        body = CompletionRequest(prompt="x", truncate_prompt_tokens=limit)
        kept = body.truncated(prompt, max_tokens, 8192)
        assert list(kept.token_ids) == list(range(9000))[-expected:]
        assert kept.text == ("text" if expected == 9000 else None)


async def test_a_conversation_is_not_truncated_for_an_answer_of_any_length(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room was left for a model's default answer; and with max_tokens beyond the model, only one token was kept."""

    async def num_kept(client: httpx.AsyncClient, **fields: Any) -> int:
        messages = [{"role": "user", "content": "word " * 500}]
        body = {**CHAT, "messages": messages, "truncate_prompt_tokens": -1, "stop": ["e", "a", " "], **fields}
        usage = (await post(client, "/v1/chat/completions", body))["usage"]
        prompt_tokens: int = usage["prompt_tokens"]
        return prompt_tokens

    length = 256
    loaded = replace(llm.engine.loaded, max_model_len=length, sampling_defaults={"max_tokens": 64})
    monkeypatch.setattr(llm.engine, "loaded", loaded)
    async with served(llm) as client:
        assert await num_kept(client, max_tokens=100_000) == length // 2
        assert await num_kept(client, max_tokens=None) == length - 64


async def test_a_package_that_the_server_lacks_is_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to be a 500 that said nothing, which clients sent again."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(llm.engine, "grammars", GrammarCompiler(llm.engine.loaded))
    async with served(llm) as client:
        fields = {"response_format": {"type": "json_object"}}
        error = (await post(client, "/v1/chat/completions", {**CHAT, **fields}, 400))["error"]
        assert error["param"] == "response_format"
        assert "llguidance is not installed" in error["message"]


async def test_what_cannot_be_imported_for_another_reason_is_no_fault_of_the_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise ImportError("cannot import name 'x' from 'y' (/a/folder/of/the/server)")

    monkeypatch.setattr(ChatCompletionRequest, "as_prompt", broken)
    async with served(llm) as client:
        error = (await post(client, "/v1/chat/completions", CHAT, 500))["error"]
        assert error["message"] == "the server failed to answer this request"
