"""Small requests for responses that would contain the same thing many times."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from support.in_process_server import served

from radixkv import LLM
from radixkv.server.output import response_size

PROMPT = [5] * 100
COMPLETION = {"prompt": [PROMPT, PROMPT], "max_tokens": 1, "temperature": 1, "seed": 0}
CHAT = {"messages": [{"role": "user", "content": "Name a colour. " * 8}], "max_tokens": 50, "logprobs": True, "seed": 0}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", COMPLETION | {"n": 3, "echo": True}, "echo"),
        ("completions", COMPLETION | {"n": 3, "return_token_ids": True}, "return_token_ids"),
        ("completions", COMPLETION | {"max_tokens": 100, "logprobs": 9}, "logprobs"),
        ("completions", COMPLETION | {"echo": True, "logprobs": 9}, "logprobs"),
        ("completions", COMPLETION | {"max_tokens": 100, "n": 10, "use_beam_search": True, "logprobs": 0}, "logprobs"),
        ("chat/completions", CHAT | {"n": 4, "top_logprobs": 9}, "logprobs"),
        ("chat/completions", CHAT | {"prompt_logprobs": 20}, "logprobs"),
        ("chat/completions", CHAT | {"prompt_logprobs": 20, "logprobs": False}, "prompt_logprobs"),
    ],
)
async def test_a_response_is_bounded_before_anything_is_computed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], field: str
) -> None:
    """A response of gigabytes to a request of 8 MB used to be possible, all of it in memory.

    And the error advised to stream where streams are refused.
    """
    monkeypatch.setattr(response_size, "MAX_REPEATED_TOKENS", 500)
    monkeypatch.setattr(response_size, "MAX_RETURNED_LOGPROBS", 600)
    num_steps = llm.engine.num_steps
    async with served(llm) as client:
        refused = await client.post(f"/v1/{path}", json=body)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, field), refused.text
        assert error["message"].endswith(", or stream") == ("prompt_logprobs" not in body)
        assert llm.engine.num_steps == num_steps


async def test_a_long_prompt_does_not_lift_the_bound_from_the_others(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them has the room that is left after itself, not after the longest."""
    monkeypatch.setattr(response_size, "MAX_RETURNED_LOGPROBS", 600)
    long = [5] * (llm.engine.loaded.max_model_len - 1)
    num_steps = llm.engine.num_steps
    async with served(llm) as client:
        body = {"prompt": [PROMPT, long], "max_tokens": 100, "logprobs": 9}
        refused = await client.post("/v1/completions", json=body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["message"].startswith("logprobs: up to 1,010 of them")
        assert llm.engine.num_steps == num_steps


async def test_what_is_within_the_bounds_is_answered_and_what_is_streamed_has_none(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_size, "MAX_REPEATED_TOKENS", 400)
    monkeypatch.setattr(response_size, "MAX_RETURNED_LOGPROBS", 1000)
    async with served(llm) as client:
        for options in ({"n": 2}, {"n": 3, "stream": True}, {"n": 1, "logprobs": 0}):
            answer = await client.post("/v1/completions", json=COMPLETION | {"echo": True} | options)
            assert answer.status_code == 200, answer.text


async def test_prompts_of_ids_are_decoded_once_and_off_the_event_loop(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding five hundred cached ones used to block the event loop for seconds, and each choice decoded its own again."""
    tokenizer, threads = llm.get_tokenizer(), list[threading.Thread]()
    decode = tokenizer.decode

    def noting(token_ids: list[int], *arguments: Any, **options: Any) -> str:
        if len(token_ids) == len(PROMPT):
            threads.append(threading.current_thread())
        text: str = decode(token_ids, *arguments, **options)
        return text

    monkeypatch.setattr(tokenizer, "decode", noting)
    async with served(llm) as client:
        answer = await client.post("/v1/completions", json=COMPLETION | {"n": 2, "echo": True})
    texts = [choice["text"] for choice in answer.json()["choices"]]
    assert len(texts) == 4
    assert all(text.startswith(decode(PROMPT)) for text in texts)
    assert len(threads) == 2
    assert threading.current_thread() not in threads
