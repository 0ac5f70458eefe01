"""vLLM's fields in requests of completions and chats: those that do something, and the defaults of all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.client_payloads import CHAT, TEXT, post
from support.in_process_server import served

from radixkv import LLM


async def test_vllms_fields(default_llm: LLM) -> None:
    tokenizer = default_llm.get_tokenizer()
    four = tokenizer(" four", add_special_tokens=False)["input_ids"]
    async with served(default_llm) as client:
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
async def test_vllms_defaults_are_accepted(llm: LLM, use_beam_search: bool) -> None:
    async with served(llm) as client:
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


async def test_structural_tags(llm: LLM) -> None:
    structure = {"begin": "<city>", "schema": {"enum": ["Rome", "Oslo"]}, "end": "</city>"}
    tag = {"triggers": ["<city"], "structures": [structure]}
    async with served(llm) as client:
        for fields in (
            {"response_format": {"type": "structural_tag", **tag}},
            {"structured_outputs": {"structural_tag": json.dumps(tag)}},
        ):
            await post(client, "/v1/completions", {**TEXT, **fields, "max_tokens": 2})
        wrong = {"type": "structural_tag", **tag, "triggers": ["nothing"]}
        answer = await post(client, "/v1/completions", {**TEXT, "response_format": wrong}, status=400)
        assert answer["error"]["param"] == "response_format"
        assert "start with one of the triggers" in answer["error"]["message"]
