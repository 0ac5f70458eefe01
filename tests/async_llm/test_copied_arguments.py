"""What is given to a call is copied by it: a change afterwards has no effect."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from support.async_streams import GREEDY, prompts, running_llm
from support.chat_templates import TEMPLATES, make_tokenizer
from support.replica_servers import tiny_llm
from support.tiny_engine import tiny

from radixkv import (
    BeamSearchParams,
    CompletionOutput,
    SamplingParams,
)


async def test_what_is_changed_after_a_call_has_no_effect() -> None:
    """Tasks that shared parameters got each other's values, because these were read once the prompt was tokenized."""
    prompt = prompts(1)[0]
    params = SamplingParams(max_tokens=6, ignore_eos=True, stop_token_ids=[])
    search = BeamSearchParams(2, 3, ignore_eos=True)
    changed = {"seed": 2, "max_tokens": 9}
    offline = tiny()
    (expected,) = offline.generate([prompt], replace(params, seed=1), use_tqdm=False)
    async with running_llm(offline) as llm:
        params.seed = 1
        own = {"prompt_token_ids": list(prompt["prompt_token_ids"])}
        pieces = llm.generate(own, params)
        for name, value in changed.items():
            setattr(params, name, value)
        assert isinstance(params.stop_token_ids, list)
        params.stop_token_ids += expected.outputs[0].token_ids
        own["prompt_token_ids"].append(5)
        token_ids = [token_id async for piece in pieces for token_id in piece.outputs[0].token_ids]
        assert token_ids == expected.outputs[0].token_ids
        beams = asyncio.ensure_future(llm.beam_search(prompt, search))
        await asyncio.sleep(0)
        search.max_tokens = 5
        best = (await beams).sequences[0]
        assert len(best.tokens) == len(prompt["prompt_token_ids"]) + 3


async def test_answers_begun_elsewhere_are_copied_by_the_call() -> None:
    (prompt,) = prompts(1)
    offline = tiny()
    whole = offline.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    async with running_llm(offline) as llm:
        begun = CompletionOutput(0, "", whole[:4])
        pieces = llm.generate({**prompt, "resume": [begun]}, GREEDY)
        begun.token_ids.append(whole[4])
        assert [token_id async for piece in pieces for token_id in piece.outputs[0].token_ids] == whole[4:]


async def test_what_belongs_to_a_conversation_is_copied_by_the_call() -> None:
    tokenizer = make_tokenizer(TEMPLATES["think_switch"])
    offline = tiny_llm(tokenizer)
    async with running_llm(offline) as llm:
        given: dict[str, Any] = {
            "messages": [{"role": "user", "content": "Go."}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "chat_template_kwargs": {"enable_thinking": True},
            "cache": {"read": True},
        }
        one = SamplingParams(max_tokens=1)
        expected = {output.prompt async for output in llm.chat(**given, sampling_params=one)}
        pieces = llm.chat(**given, sampling_params=one)
        given["messages"][0]["content"] = "Stay."
        given["tools"][0]["function"]["name"] = "g"
        given["chat_template_kwargs"]["enable_thinking"] = False
        given["cache"]["read"] = "no"
        assert {output.prompt async for output in pieces} == expected
