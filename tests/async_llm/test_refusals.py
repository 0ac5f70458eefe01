"""What `AsyncLLM` refuses, and when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.async_streams import GREEDY, prompts, running_llm, tokens_of
from support.model_zoo import VOCAB_SIZE

from radixkv import BeamSearchParams, SamplingParams


async def test_bad_requests_are_refused_and_disturb_no_other() -> None:
    async with running_llm() as llm:
        neighbour = asyncio.create_task(tokens_of(llm, prompts(1)[0]))
        for prompt, params, error in [
            ({"prompt_token_ids": []}, GREEDY, ValueError),
            ({"prompt_token_ids": [VOCAB_SIZE]}, GREEDY, ValueError),
            ({"prompt_token_ids": [5]}, SamplingParams(n=1000), ValueError),
            ([{"prompt_token_ids": [5]}, {"prompt_token_ids": [6]}], GREEDY, ValueError),
            ({"prompt_token_ids": [5]}, BeamSearchParams(2, 2), TypeError),
            (7, GREEDY, TypeError),
        ]:
            with pytest.raises(error):
                await anext(llm.generate(prompt, params))  # type: ignore[arg-type]
        async for _ in llm.generate({"prompt_token_ids": [5]}, GREEDY, "twice"):
            with pytest.raises(ValueError, match="'twice' belongs to an unfinished request"):
                await anext(llm.generate({"prompt_token_ids": [6]}, GREEDY, "twice"))
            break
        with pytest.raises(TypeError, match="request_id: expected a string, got 7"):
            await anext(llm.generate({"prompt_token_ids": [5]}, GREEDY, 7))  # type: ignore[arg-type]
        assert len((await neighbour)[0]) == 12


async def test_errors_of_a_request_take_the_place_of_its_first_output() -> None:
    async with running_llm() as llm:
        wrong: Any = "greedy"
        for params in (wrong, SamplingParams(stop_token_ids=[VOCAB_SIZE]), SamplingParams(logprobs=VOCAB_SIZE + 1)):
            for pieces in (llm.generate(prompts(1)[0], params), llm.chat([{"role": "user", "content": "x"}], params)):
                with pytest.raises((TypeError, ValueError), match=r"^(sampling_params|stop_token_ids|logprobs): "):
                    await anext(pieces)
        wrong_options: Any = ({"continue_final_message": True}, {"tools": [5]}, {"chat_template_kwargs": 5})
        for options in wrong_options:
            pieces = llm.chat([{"role": "user", "content": "x"}], **options)
            with pytest.raises((TypeError, ValueError), match=f"^{next(iter(options))}: "):
                await anext(pieces)


async def test_values_assigned_after_construction_are_named() -> None:
    async with running_llm() as llm:
        for name, value, message in (
            ("n", "3", "n: expected a whole number, got '3'"),
            ("structured_outputs", {"choice": ["a"]}, "structured_outputs: expected"),
            ("bad_words", 5, "bad_words: expected"),
        ):
            params = SamplingParams(max_tokens=3)
            setattr(params, name, value)
            with pytest.raises((TypeError, ValueError), match=f"^{message}"):
                await anext(llm.generate(prompts(1)[0], params))
