"""Why a prompt would not be reused, asked of an engine that is answering others."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.async_streams import ENDLESS, running_llm
from support.replica_servers import tiny_llm
from support.time_limit import HANGING

MESSAGES = [{"role": "user", "content": "What is a radix tree, and what is it good for? Answer in two sentences."}]
PROMPT = "The library opens at nine. Today is the 20th of November. Who are you?"


async def test_a_prompt_is_explained_while_others_stream_as_it_is_offline(default_tokenizer: Any) -> None:
    offline = tiny_llm(default_tokenizer, block_size=4)
    async with running_llm(offline) as llm:
        unknown = await llm.explain(PROMPT)
        assert (unknown.num_reused_tokens, unknown.difference) == (0, None)
        async with contextlib.aclosing(llm.generate(PROMPT, ENDLESS)) as stream:
            await anext(stream)
            seen = await llm.explain(PROMPT.replace("20th", "21st"))
            assert seen.num_reused_tokens > 8
            assert seen.difference is not None
            assert "".join(seen.difference.prompt) != "".join(seen.difference.cached)
            again = await llm.call(lambda _: offline.explain(PROMPT.replace("20th", "21st")))
            assert again.difference is not None
            # The stream may have gone on meanwhile, and with it what is cached after its prompt.
            num_seen = len(seen.difference.cached)
            assert again.difference.cached[:num_seen] == seen.difference.cached
            assert replace(again, difference=seen.difference) == seen
            assert replace(again.difference, cached=seen.difference.cached) == seen.difference
            await anext(stream)
        assert "another cache salt" in str(await llm.explain(PROMPT, cache_salt="ann"))
        explained = await llm.call(lambda _: offline.explain(MESSAGES))
        assert (await llm.explain(MESSAGES)).num_prompt_tokens == explained.num_prompt_tokens
        with pytest.raises(
            TypeError, match="prompt: expected a string, token ids, a dictionary or a list of messages, got int"
        ):
            await llm.explain(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["prompt", "messages"])
async def test_what_is_changed_while_the_tokenizer_is_busy_is_neither_explained_nor_pinned(
    default_tokenizer: Any, form: str
) -> None:
    """A list of token ids or messages that the program went on writing was read when its turn had come."""
    async with running_llm(tiny_llm(default_tokenizer, block_size=4)) as llm:
        given: list[Any] = [5, 6, 7, 8, 9, 10, 11, 12] if form == "prompt" else [dict(MESSAGES[0])]
        expected = (await llm.explain(given)).num_prompt_tokens
        may_go_on = threading.Event()
        busy = asyncio.ensure_future(llm.run_tokenizer(lambda _: may_go_on.wait(HANGING)))
        explains, pins = asyncio.ensure_future(llm.explain(given)), asyncio.ensure_future(llm.pin(given))
        await asyncio.sleep(0)  # all have begun
        if form == "prompt":
            given += range(3, 40)
        else:
            given[0]["content"] += " Say it at length, and say it again."
        may_go_on.set()
        await busy
        assert (await explains).num_prompt_tokens == expected
        pin = await pins
        assert pin.num_tokens == expected // 4 * 4
        await llm.unpin(pin)


async def test_an_explanation_says_what_lies_on_the_disk(default_tokenizer: Any, tmp_path: Path) -> None:
    with tiny_llm(default_tokenizer, block_size=4, disk_cache=tmp_path) as before:
        before.generate(PROMPT, ENDLESS, use_tqdm=False)
    async with running_llm(tiny_llm(default_tokenizer, block_size=4, disk_cache=tmp_path)) as llm:
        explanation = await llm.explain(PROMPT)
        assert [below.medium for below in explanation.below] == ["disk"]
        assert "in the tier 'disk'" in str(explanation)
