"""`/tokenize` gives the tokens that a completion with the same fields has as its prompt."""

from __future__ import annotations

import copy
from typing import Any

import httpx
from support.in_process_server import serve
from support.replica_servers import tiny_llm
from tokenizers.processors import TemplateProcessing

MESSAGES = {"messages": [{"role": "user", "content": "Hi"}]}
PROMPT = {"prompt": "Hi"}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"add_special_tokens": True},
    {"add_special_tokens": False},
    {"add_special_tokens": None, "add_generation_prompt": None, "continue_final_message": None, "tools": None},
)


def test_tokens_are_those_of_a_completion_with_the_same_options(default_tokenizer: Any) -> None:
    """Special tokens used to be missing from conversations, and null did not mean the default."""
    tokenizer = copy.deepcopy(default_tokenizer)
    begin = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.bos_token_id)]
    )

    async def scenario(client: httpx.AsyncClient) -> None:
        for path, body in (("/v1/chat/completions", MESSAGES), ("/v1/completions", PROMPT)):
            for options in OPTIONS:
                found = await client.post("/tokenize", json={**body, **options})
                assert found.status_code == 200, found.text
                asked = {name: value for name, value in options.items() if value is not None}
                answer = await client.post(path, json={**body, **asked, "max_tokens": 1, "return_token_ids": True})
                answered = answer.json()
                prompt = answered if "messages" in body else answered["choices"][0]
                assert found.json()["tokens"] == prompt["prompt_token_ids"], (body, options)

    serve(tiny_llm(tokenizer), scenario)
