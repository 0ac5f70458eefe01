"""What is refused is named, in as few words as it takes, however much was sent."""

from __future__ import annotations

from typing import Any

import httpx
from support.in_process_server import serve

from radixkv import LLM


def test_a_part_that_is_no_text_is_refused_by_its_type(llm: LLM) -> None:
    """The error used to say that it lacks a text and has an unknown field."""

    async def scenario(client: httpx.AsyncClient) -> None:
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        body: dict[str, Any] = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Look:"}, part]}]}
        for path in ("/v1/chat/completions", "/tokenize"):
            refused = await client.post(path, json=body)
            assert refused.status_code == 400
            error = refused.json()["error"]
            expected = "messages.0.content.1: parts of type 'image_url' are not supported, only text, refusal"
            assert (error["message"], error["param"]) == (expected, "messages")

    serve(llm, scenario)


def test_the_name_of_another_model_is_not_repeated_at_any_length(llm: LLM) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        refused = await client.post("/v1/completions", json={"model": "m" * 500_000, "prompt": "Hi"})
        assert refused.status_code == 404
        assert len(refused.content) < 400

    serve(llm, scenario)
