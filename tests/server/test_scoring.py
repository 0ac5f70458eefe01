"""Prompts that are scored: with `max_tokens` 0 an answer has no token, and each list of log-probabilities its own length."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.in_process_server import served
from support.replica_servers import tiny_llm
from support.tenant_keys import bearer, entry, tokens_left

from radixkv import LLM
from radixkv.server.access.rate_limits import RateLimits
from radixkv.server.access.tenants import Tenants

TEXT = "One, two, three, four,"
SCORED = {"prompt": TEXT, "echo": True, "max_tokens": 0, "temperature": 0}


async def test_a_request_for_no_token_has_none_in_the_log_and_is_charged_for_none(llm: LLM) -> None:
    """The log and the trace counted the token that the engine generates in any case, and the key's limit did, too."""
    logged: list[dict[str, Any]] = []
    tenants = Tenants(keys={"ann": entry("a", tokens_per_minute=5000)})
    message = {"model": "model", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 0}
    async with served(
        llm,
        tenants=tenants,
        rate_limits=RateLimits(lambda: 0.0),
        write_log=lambda line: logged.append(json.loads(line)),
    ) as client:
        left = 5000
        for path, body in (
            ("completions", SCORED),
            ("completions", SCORED | {"prompt": [TEXT, "Five"], "logprobs": 1, "stream": True}),
            ("messages", message),
            ("messages", message | {"stream": True}),
        ):
            answer = await client.post(f"/v1/{path}", json=body, headers=bearer("a"))
            assert answer.status_code == 200, answer.text
            assert (logged[-1]["completion_tokens"], logged[-1]["complete"]) == (0, True)
            left -= logged[-1]["prompt_tokens"]
            assert await tokens_left(client, "a") == left


async def test_the_token_behind_a_scored_prompt_is_not_returned(llm: LLM) -> None:
    """Its id used to be returned, and so was the reason why it would have ended an answer."""
    async with served(llm) as client:
        first = (await client.post("/v1/completions", json=SCORED | {"max_tokens": 1, "return_token_ids": True})).json()
        (next_token,) = first["choices"][0]["token_ids"]
        body = SCORED | {"return_token_ids": True, "logprobs": 1, "stop_token_ids": [next_token]}
        (choice,) = (await client.post("/v1/completions", json=body)).json()["choices"]
        assert choice["text"] == TEXT
        assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("length", None, [])
        assert len(choice["logprobs"]["tokens"]) == len(choice["prompt_token_ids"])
        streamed = (await client.post("/v1/completions", json=body | {"stream": True})).text.split("\n\n")
        (chunk,) = [json.loads(event.removeprefix("data: ")) for event in streamed[:-2]]
        assert chunk["choices"] == [choice]


@pytest.mark.parametrize("logprobs", [0, 1, 5])
async def test_the_chosen_token_is_among_the_likeliest(llm: LLM, logprobs: int) -> None:
    """As with OpenAI, there may be one more than were asked for."""
    async with served(llm) as client:
        answer = await client.post("/v1/completions", json=SCORED | {"max_tokens": 2, "logprobs": logprobs})
        scores: dict[str, Any] = answer.json()["choices"][0]["logprobs"]
        for token, logprob, top in list(
            zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True)
        )[1:]:
            assert top[token] == logprob
            assert max(1, logprobs) <= len(top) <= logprobs + 1


async def test_an_answer_that_is_too_short_for_min_tokens_is_refused_in_the_words_of_the_request(llm: LLM) -> None:
    """Messages named a max_tokens that had not been sent, or another value of it."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 4, "min_tokens": 5}
    async with served(llm) as client:
        for path, body, message in (
            ("chat/completions", chat, "min_tokens: expected at most 4, the limit of the answer's tokens, got 5"),
            ("completions", SCORED | {"min_tokens": 1}, "min_tokens: expected none with max_tokens=0, got 1"),
            ("completions", SCORED | {"min_tokens": 2}, "min_tokens: expected none with max_tokens=0, got 2"),
        ):
            error = (await client.post(f"/v1/{path}", json=body)).json()["error"]
            assert (error["message"], error["param"]) == (message, "min_tokens")


async def test_a_scored_prompt_leaves_room_for_the_token_behind_it(default_tokenizer: Any) -> None:
    llm = tiny_llm(default_tokenizer, max_model_len=64)
    length = llm.engine.loaded.max_model_len
    async with served(llm) as client:
        scored = await client.post("/v1/completions", json=SCORED | {"prompt": [5] * (length - 1)})
        assert scored.json()["usage"]["prompt_tokens"] == length - 1
        refused = await client.post("/v1/completions", json=SCORED | {"prompt": [5] * length})
        assert refused.json()["error"]["code"] == "context_length_exceeded"


async def test_a_prompt_s_log_probabilities_are_as_many_as_requested_whatever_echo_has(llm: LLM) -> None:
    async with served(llm) as client:
        body = SCORED | {"prompt_logprobs": 1}
        (alone,) = (await client.post("/v1/completions", json=body)).json()["choices"]
        (beside,) = (await client.post("/v1/completions", json=body | {"logprobs": 5})).json()["choices"]
        counts = [[len(entries or ()) for entries in choice["prompt_logprobs"]] for choice in (alone, beside)]
        assert counts[0] == counts[1]
        assert set(counts[0][1:]) <= {1, 2}
