"""`/tokenize` gives the tokens that a completion with the same fields has as its prompt."""

from __future__ import annotations

import copy
from typing import Any

from support.in_process_server import served
from support.replica_servers import tiny_llm
from tokenizers.processors import TemplateProcessing

from radixkv import LLM

MESSAGES = {"messages": [{"role": "user", "content": "Hi"}]}
PROMPT = {"prompt": "Hi"}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"add_special_tokens": True},
    {"add_special_tokens": False},
    {"add_special_tokens": None, "add_generation_prompt": None, "continue_final_message": None, "tools": None},
)


async def test_tokens_are_those_of_a_completion_with_the_same_options(default_tokenizer: Any) -> None:
    """Special tokens used to be missing from conversations, and null did not mean the default."""
    tokenizer = copy.deepcopy(default_tokenizer)
    begin = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.bos_token_id)]
    )
    async with served(tiny_llm(tokenizer)) as client:
        for path, body in (("/v1/chat/completions", MESSAGES), ("/v1/completions", PROMPT)):
            for options in OPTIONS:
                found = await client.post("/tokenize", json={**body, **options})
                assert found.status_code == 200, found.text
                asked = {name: value for name, value in options.items() if value is not None}
                answer = await client.post(path, json={**body, **asked, "max_tokens": 1, "return_token_ids": True})
                answered = answer.json()
                prompt = answered if "messages" in body else answered["choices"][0]
                assert found.json()["tokens"] == prompt["prompt_token_ids"], (body, options)


async def test_a_text_ignores_the_options_of_conversations(llm: LLM) -> None:
    """``continue_final_message`` was refused, and ``tools`` were ignored only if they made sense in a conversation."""
    tool = {"type": "function", "function": {"name": "f"}}
    ignored: tuple[dict[str, Any], ...] = (
        {"continue_final_message": True},
        {"add_generation_prompt": False},
        {"tools": [tool, tool]},
        {"chat_template_kwargs": {"tokenize": True}},
    )
    async with served(llm) as client:
        plain = (await client.post("/tokenize", json=PROMPT)).json()
        for options in ignored:
            answer = await client.post("/tokenize", json={**PROMPT, **options})
            assert (answer.status_code, answer.json()) == (200, plain), options
        for options in (ignored[0], ignored[2]):
            assert (await client.post("/tokenize", json={**MESSAGES, **options})).status_code == 400
        for body in ({}, {**PROMPT, **MESSAGES}):
            refused = await client.post("/tokenize", json=body)
            assert refused.json()["error"]["message"] == "prompt: expected either prompt or messages"
