"""Where answers to chats end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.answer_forms import NOW
from support.chat_templates import TEMPLATES, make_tokenizer
from support.model_zoo import build

from radixkv import LLM, SamplingParams

QUESTION = [{"role": "user", "content": "Hi"}]


def llm_of(name: str) -> LLM:
    """A tiny random model that speaks like a family."""
    tokenizer = make_tokenizer(TEMPLATES[name])
    model = build("llama", {"vocab_size": len(tokenizer), "max_position_embeddings": 1024})
    return LLM(model, tokenizer=tokenizer, num_blocks=200, block_size=16)


def test_nothing_that_ends_text_breaks_a_required_call() -> None:
    """A stop token did, and a stop string did not."""
    llm = llm_of("hermes")
    params = SamplingParams(seed=1, max_tokens=90)
    options: Any = {"use_tqdm": False, "tools": [NOW], "tool_choice": "required", "parallel_tool_calls": False}
    (expected,) = llm.chat(QUESTION, params, **options)
    assert "r" in expected.outputs[0].text
    r = llm.get_tokenizer().convert_tokens_to_ids("r")
    for ends in ({"stop": ["r"]}, {"stop_token_ids": [r]}):
        (output,) = llm.chat(QUESTION, replace(params, **ends), **options)
        assert output.outputs[0].text == expected.outputs[0].text
        assert output.outputs[0].finish_reason == "stop"
