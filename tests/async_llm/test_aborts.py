"""Requests that a program aborts, before and after the engine has them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.async_streams import ENDLESS, prompts, running_llm, tokens_of, until
from support.held_steps import HeldSteps
from support.replica_servers import tiny_llm
from support.time_limit import HANGING
from support.tiny_engine import tiny

from radixkv import (
    BeamSearchParams,
    CompletionOutput,
    SamplingParams,
    StructuredOutputsParams,
    async_llm,
)


async def test_abort_ends_the_iteration() -> None:
    async with running_llm() as llm:
        reasons = []
        async for output in llm.generate(prompts(1)[0], ENDLESS, "mine"):
            llm.abort("mine")
            reasons.append(output.outputs[0].finish_reason)
        assert reasons[-1] == "abort"
        assert set(reasons[:-1]) == {None}
        steps = await llm.call(HeldSteps)
        search = asyncio.create_task(llm.beam_search(prompts(1)[0], BeamSearchParams(2, 9, ignore_eos=True), "beams"))
        steps.allow(2)
        await until(lambda: llm.stats.num_running)
        llm.abort("beams")
        steps.allow_all()
        assert (await search).sequences == []
        llm.abort("no such request")


@pytest.mark.parametrize("prepared", ["tokenized", "compiled", "resumed"])
async def test_a_request_that_is_aborted_before_the_engine_has_it_ends(
    prepared: str, default_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was found under its id then, and it ran to its end."""
    offline = tiny_llm(default_tokenizer, block_size=4)
    begun, may_go_on = threading.Event(), threading.Event()

    def held(function: Callable[..., Any]) -> Callable[..., Any]:
        def wait_first(*arguments: Any, **options: Any) -> Any:
            begun.set()
            assert may_go_on.wait(HANGING)
            return function(*arguments, **options)

        return wait_first

    prompt: dict[str, Any] = {"prompt": "Who are you?"}
    params = replace(ENDLESS, max_tokens=60)
    if prepared == "tokenized":
        monkeypatch.setattr(async_llm, "as_prompts", held(async_llm.as_prompts))
    elif prepared == "compiled":
        params = replace(params, structured_outputs=StructuredOutputsParams(regex="[a-z]{200}"))
        grammars = offline.engine.grammars
        monkeypatch.setattr(grammars, "compile", held(grammars.compile))
    else:
        prompt["resume"] = [CompletionOutput(0, "", [7, 8, 9])]
        factory = offline.engine.request_factory
        monkeypatch.setattr(factory, "make", held(factory.make))
    async with running_llm(offline) as llm:

        async def reasons() -> list[str | None]:
            return [piece.outputs[0].finish_reason async for piece in llm.generate(prompt, params, "mine")]

        aborted = asyncio.create_task(reasons())
        await until(begun.is_set)
        llm.abort("mine")
        may_go_on.set()
        assert (await aborted)[-1] == "abort"
        assert (await reasons())[-1] in ("stop", "length")  # the next one with that id


@pytest.mark.parametrize("kind", [list, tuple, set, iter])
async def test_several_requests_are_aborted_in_one_call(kind: Any) -> None:
    async with running_llm() as llm:
        streams = [llm.generate(prompt, ENDLESS, name) for prompt, name in zip(prompts(2), "ab", strict=True)]
        for stream in streams:
            await anext(stream)
        for wrong in (5, None, [["a"]], ["a", 5]):
            with pytest.raises(TypeError, match="request_id: expected a string, or several, got"):
                llm.abort(wrong)
        assert llm.num_unfinished == 2
        llm.abort(kind(["a", "no such request", "b"]))
        for stream in streams:
            reasons = [output.outputs[0].finish_reason async for output in stream]
            assert reasons[-1] == "abort"


async def test_an_aborted_stream_has_the_text_of_all_its_tokens(default_tokenizer: Any) -> None:
    """Text held back because it could have become a stop string used to be lost."""
    offline = tiny_llm(default_tokenizer, block_size=4)
    params = SamplingParams(n=2, seed=1, max_tokens=50, ignore_eos=True, stop=["never" * 5])
    async with running_llm(offline) as llm:
        texts, tokens = ["", ""], [list[int](), list[int]()]
        steps = await llm.call(HeldSteps)
        steps.allow(4)
        async for output in llm.generate("Who are you?", params, "mine"):
            for part in output.outputs:
                texts[part.index] += part.text
                tokens[part.index] += part.token_ids
            llm.abort("mine")
            steps.allow_all()
        assert {part.finish_reason for part in output.outputs} == {"abort"}
        assert texts == [default_tokenizer.decode(token_ids, skip_special_tokens=True) for token_ids in tokens]


async def test_a_request_aborted_before_its_first_token_has_all_its_samples() -> None:
    """It had one, with which it could not be resumed."""
    params = SamplingParams(n=3, seed=1, temperature=1.0, max_tokens=6, logprobs=1)
    prompt: Any = {"prompt_token_ids": list(range(3, 33))}
    async with running_llm(tiny(max_num_batched_tokens=8)) as llm:
        whole = await tokens_of(llm, prompt, params)
        await llm.reset_prefix_cache()
        steps = await llm.call(HeldSteps)
        aborted = asyncio.create_task(anext(llm.generate(prompt, params, "mine")))
        await until(lambda: llm.num_unfinished)
        llm.abort("mine")
        steps.allow_all()
        parts = (await aborted).outputs
        assert [(part.index, part.token_ids, part.finish_reason) for part in parts] == [
            (index, [], "abort") for index in range(3)
        ]
        assert await tokens_of(llm, {**prompt, "resume": parts}, params) == whole
