"""What other projects' clients send, as recorded from their sources, and vLLM's fields that they add to it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from support.in_process_server import make_client
from support.replica_servers import tiny_llm

from radixkv import LLM, AsyncLLM
from radixkv.model.tokenizer import with_chat_template
from radixkv.prompts import Prompt, as_chat_prompts, as_template_message
from radixkv.sampling.structured_output import GrammarCompiler
from radixkv.server.chat_messages import ChatMessage, as_messages
from radixkv.server.chat_request import ChatCompletionRequest
from radixkv.server.completions import CompletionRequest

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Name three colours."}], "temperature": 0}
TEXT: dict[str, Any] = {"prompt": "One, two, three,", "temperature": 0}


def run(llm: LLM, test: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncLLM(llm) as engine, make_client(engine) as client:
            await test(client)

    asyncio.run(main())


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int = 200) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == status, response.text
    if body.get("stream"):
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]
    return response.json()


def test_lm_eval_local_completions(llm: LLM) -> None:
    """lm-eval 0.4.13, `lm_eval/models/openai_completions.py`: loglikelihood (batches of token ids), generate_until."""
    tokenizer = llm.get_tokenizer()
    context, continuation = "One, two, three,", " four, five"
    whole = tokenizer(context + continuation)["input_ids"]
    length = len(tokenizer(context)["input_ids"])

    async def test(client: httpx.AsyncClient) -> None:
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

    run(llm, test)


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
    function = {"arguments": arguments, "name": "f", "parsed_arguments": {"a": 1}}
    return {"id": "c1", "function": function, "type": "function", "index": 0}


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
        over_http = body.as_prompt(as_messages(body.messages), None, loaded)
        assert over_http == in_program
    text = as_chat_prompts(conversations[2], loaded)[0].text or ""
    assert "No." in text


def test_endpoints_of_other_models_say_so(llm: LLM) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        error = (await post(client, "/v1/embeddings", {"input": "Hi"}, 404))["error"]
        assert error["message"] == "there is no POST /v1/embeddings; /openapi.json describes what there is"
        assert error["type"] == "invalid_request_error"

    run(llm, test)


def test_guidellm_and_vllm_bench_serve(llm: LLM) -> None:
    """guidellm 0.8.1, `backends/openai/request_handlers.py`; vLLM, `benchmarks/lib/endpoint_request_func.py`."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    guidellm = {"model": "model", "stream": True, "stream_options": usage, "stop": None, "ignore_eos": True}
    bench = {"model": "model", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]

    async def test(client: httpx.AsyncClient) -> None:
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

    run(llm, test)


def test_messages_as_other_services_return_them(llm: LLM) -> None:
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
        {"role": "assistant", "content": "Hello", "annotations": [], "refusal": None, "audio": None, "tool_calls": []},
        {"role": "user", "content": "Bye", "type": "message"},
    ]

    async def test(client: httpx.AsyncClient) -> None:
        tokens = [(await post(client, "/tokenize", {"messages": messages}))["tokens"] for messages in (plain, sent)]
        assert tokens[0] == tokens[1]

    run(llm, test)


@pytest.mark.parametrize(
    "refused",
    [
        {"content": None, "refusal": "I will not."},
        {"content": [{"type": "refusal", "refusal": "I will not."}]},
        {"content": [{"type": "text", "text": "I will not."}], "refusal": None},
    ],
)
def test_refusals_of_other_servers_are_what_the_assistant_said(llm: LLM, refused: dict[str, Any]) -> None:
    def asked(answer: dict[str, Any]) -> dict[str, Any]:
        question = {"role": "user", "content": "Hi"}
        return {"messages": [question, {"role": "assistant", **answer}, question]}

    async def test(client: httpx.AsyncClient) -> None:
        plain = await post(client, "/tokenize", asked({"content": "I will not."}))
        assert (await post(client, "/tokenize", asked(refused)))["tokens"] == plain["tokens"]

    run(llm, test)


def test_vllms_fields(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    four = tokenizer(" four", add_special_tokens=False)["input_ids"]

    async def test(client: httpx.AsyncClient) -> None:
        body = {**TEXT, "max_tokens": 3}
        options = {"return_token_ids": True, "prompt_logprobs": 1, "request_id": "mine", "guided_decoding_backend": "x"}
        answer = await post(client, "/v1/completions", {**body, **options})
        (choice,) = answer["choices"]
        assert answer["id"] == "cmpl-mine"
        assert choice["prompt_token_ids"] == tokenizer(body["prompt"])["input_ids"]
        assert tokenizer.decode(choice["token_ids"]) == choice["text"]
        assert len(choice["token_ids"]) == 3
        first, *others = choice["prompt_logprobs"]
        assert first is None
        for token_id, entries in zip(choice["prompt_token_ids"][1:], others, strict=True):
            assert entries[f"{token_id}"]["decoded_token"] == tokenizer.decode([token_id])
            assert min(entry["rank"] for entry in entries.values()) == 1

        chunks = await post(client, "/v1/completions", {**body, "return_token_ids": True, "stream": True})
        assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == choice["token_ids"]
        assert [chunk["choices"][0]["prompt_token_ids"] for chunk in chunks] == [
            choice["prompt_token_ids"],
            *[None] * (len(chunks) - 1),
        ]

        answer = await post(client, "/v1/chat/completions", {**CHAT, "max_tokens": 3, **options})
        assert answer["id"] == "chatcmpl-mine"
        assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
        assert len(answer["choices"][0]["token_ids"]) == 3
        chat_stream = {**CHAT, "max_tokens": 3, "return_token_ids": True, "stream": True}
        chunks = await post(client, "/v1/chat/completions", chat_stream)
        assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
        ids = [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"] or []]
        assert ids == answer["choices"][0]["token_ids"]

        for change, text in (
            ({"bad_words": ["four"]}, None),
            ({"allowed_token_ids": four, "ignore_eos": True}, " four four four"),
            ({"truncate_prompt_tokens": 2, "echo": True, "max_tokens": 0}, " three,"),
            ({"truncate_prompt_tokens": -1, "echo": True, "max_tokens": 0}, body["prompt"]),
            ({"add_special_tokens": False, "echo": True, "max_tokens": 0}, body["prompt"]),
        ):
            (choice,) = (await post(client, "/v1/completions", {**body, **change}))["choices"]
            assert choice["text"] == text if text else "four" not in choice["text"]
        truncated = await post(client, "/v1/chat/completions", {**CHAT, "max_tokens": 1, "truncate_prompt_tokens": 5})
        assert truncated["usage"]["prompt_tokens"] == 5

    run(llm, test)


# The defaults of vLLM 0.32's request classes and of the sampling behind them, and those of fields of older versions.
VLLM_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(
        ("logit_bias", "max_tokens", "seed", "stream_options", "user", "watermarking", "truncate_prompt_tokens")
    ),
    **dict.fromkeys(
        ("truncation_side", "prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "response_format")
    ),
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")),
    **dict.fromkeys(("guided_decoding_backend", "guided_whitespace_pattern", "structural_tag", "logits_processors")),
    **dict.fromkeys(("session_id", "return_tokens_as_token_ids", "return_token_ids", "return_mm_kwargs", "cache_salt")),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "repetition_detection")),
    **dict.fromkeys(("thinking_token_budget", "stream_interval")),
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "n": 1,
    "stop": [],
    "stop_token_ids": [],
    "bad_words": [],
    "min_tokens": 0,
    "stream": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "spaces_between_special_tokens": True,
    "return_token_offsets": False,
    "mm_payload": "tensors",
    "routed_experts_prompt_start": 0,
    "priority": 0,
    "request_id": "0123456789abcdef",
}
VLLM_CHAT_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("max_completion_tokens", "tools", "reasoning_effort", "documents", "chat_template")),
    **dict.fromkeys(("chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "return_prompt_text")),
    "logprobs": False,
    "top_logprobs": 0,
    "tool_choice": "none",
    "include_reasoning": True,
    "parallel_tool_calls": True,
    "echo": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
}
VLLM_COMPLETION_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("logprobs", "suffix", "prompt_embeds", "best_of")),
    "echo": False,
    "add_special_tokens": True,
}


@pytest.mark.parametrize("use_beam_search", [False, True])
def test_vllms_defaults_are_accepted(llm: LLM, use_beam_search: bool) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for path, body, defaults in (
            ("/v1/completions", TEXT, VLLM_COMPLETION_DEFAULTS),
            ("/v1/chat/completions", CHAT, VLLM_CHAT_DEFAULTS),
        ):
            bounded = {**body, "max_tokens": 2, "use_beam_search": use_beam_search}
            plain, full = [
                (await post(client, path, each))["choices"][0]
                for each in (bounded, {**VLLM_DEFAULTS, **defaults, **bounded})
            ]
            assert plain == full

    run(llm, test)


def test_the_longest_prompt_leaves_room_for_the_default_answer(default_tokenizer: Any) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        long = {"prompt": " word" * 500, "truncate_prompt_tokens": -1, "ignore_eos": True}
        usage = (await post(client, "/v1/completions", long))["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (400 - 16, 16)

    run(tiny_llm(default_tokenizer, max_model_len=400), test)


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
def test_impossible_values_are_named(llm: LLM, fields: dict[str, Any], param: str) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
            response = await client.post(path, json={**body, "max_tokens": 1, **fields})
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == param

    run(llm, test)


def test_a_text_that_no_tokens_of_the_model_can_hold_is_refused_even_if_it_is_to_be_truncated(
    default_tokenizer: Any,
) -> None:
    length = max(len(token) for token in default_tokenizer.get_vocab())

    async def test(client: httpx.AsyncClient) -> None:
        for num_characters, status in ((16 * length, 200), (16 * length + 1, 400)):
            body = {"prompt": "a" * num_characters, "truncate_prompt_tokens": 5, "max_tokens": 1}
            answer = await post(client, "/v1/completions", body, status)
        message = (
            f"prompt: {num_characters} characters cannot fit into the model's 16 tokens of at most {length} characters"
        )
        assert answer["error"]["message"].startswith(f"{message}; texts longer than that are not truncated")

    run(tiny_llm(default_tokenizer, max_model_len=16), test)


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


def test_a_conversation_is_not_truncated_for_an_answer_of_any_length(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
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

    async def test(client: httpx.AsyncClient) -> None:
        assert await num_kept(client, max_tokens=100_000) == length // 2
        assert await num_kept(client, max_tokens=None) == length - 64

    run(llm, test)


def test_a_package_that_the_server_lacks_is_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to be a 500 that said nothing, which clients sent again."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(llm.engine, "grammars", GrammarCompiler(llm.engine.loaded))

    async def test(client: httpx.AsyncClient) -> None:
        fields = {"response_format": {"type": "json_object"}}
        error = (await post(client, "/v1/chat/completions", {**CHAT, **fields}, 400))["error"]
        assert error["param"] == "response_format"
        assert "llguidance is not installed" in error["message"]

    run(llm, test)


def test_what_cannot_be_imported_for_another_reason_is_no_fault_of_the_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise ImportError("cannot import name 'x' from 'y' (/a/folder/of/the/server)")

    monkeypatch.setattr(ChatCompletionRequest, "as_prompt", broken)

    async def test(client: httpx.AsyncClient) -> None:
        error = (await post(client, "/v1/chat/completions", CHAT, 500))["error"]
        assert error["message"] == "the server failed to answer this request"

    run(llm, test)


def test_structural_tags(llm: LLM) -> None:
    structure = {"begin": "<city>", "schema": {"enum": ["Rome", "Oslo"]}, "end": "</city>"}
    tag = {"triggers": ["<city"], "structures": [structure]}

    async def test(client: httpx.AsyncClient) -> None:
        for fields in (
            {"response_format": {"type": "structural_tag", **tag}},
            {"structured_outputs": {"structural_tag": json.dumps(tag)}},
        ):
            await post(client, "/v1/completions", {**TEXT, **fields, "max_tokens": 2})
        wrong = {"type": "structural_tag", **tag, "triggers": ["nothing"]}
        answer = await post(client, "/v1/completions", {**TEXT, "response_format": wrong}, status=400)
        assert answer["error"]["param"] == "response_format"
        assert "start with one of the triggers" in answer["error"]["message"]

    run(llm, test)
