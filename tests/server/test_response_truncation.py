"""``truncation: "auto"`` in `/v1/responses`: conversations that are too long go on without their oldest turns."""

from __future__ import annotations

from typing import Any

import httpx
from support.in_process_server import serve
from support.replica_servers import tiny_llm
from support.response_requests import BODY, create

MAX_MODEL_LEN = 1024
WORDS = 60
OPTIONS: dict[str, Any] = {"instructions": "You answer briefly. " * 10, "truncation": "auto"}


def question(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"{number}" + " word" * WORDS}


def test_the_oldest_turns_are_dropped_and_most_prompts_are_cached(default_tokenizer: Any) -> None:
    num_turns = 2 * MAX_MODEL_LEN // WORDS

    async def scenario(client: httpx.AsyncClient) -> None:
        previous, lengths, num_dropped = None, [], 0
        for number in range(num_turns):
            answer = await create(client, input=[question(number)], previous_response_id=previous, **OPTIONS)
            previous, usage = answer["id"], answer["usage"]
            cached = usage["input_tokens_details"]["cached_tokens"]
            if lengths and usage["input_tokens"] < lengths[-1]:
                num_dropped += 1
                assert cached >= 40  # the instructions
            elif lengths:
                assert cached >= lengths[-1] - 1
            lengths.append(usage["input_tokens"])
        assert answer["truncation"] == "auto"
        assert 1 <= num_dropped <= num_turns // 4
        assert min(lengths[num_turns // 2 :]) > MAX_MODEL_LEN // 3
        # All that was said is stored.
        listed = await client.get(f"/v1/responses/{previous}/input_items", params={"order": "asc", "limit": 1})
        assert listed.json()["data"][0]["content"][0]["text"] == question(0)["content"]
        body = {"previous_response_id": previous, "input": "Well?"}
        counted = await client.post("/v1/responses/input_tokens", json={**body, **OPTIONS})
        assert counted.json()["input_tokens"] < MAX_MODEL_LEN
        too_long = [question(0), {"role": "user", "content": "word " * MAX_MODEL_LEN}]
        for refused in (body, {**OPTIONS, "input": too_long}):
            answered = await client.post("/v1/responses", json={**BODY, **refused})
            assert answered.json()["error"]["code"] == "context_length_exceeded"

    serve(tiny_llm(default_tokenizer, max_model_len=MAX_MODEL_LEN), scenario)
