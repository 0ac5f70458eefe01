"""One thread tokenizes for all tenants: a tenant's texts keep another's waiting for no longer than one of them takes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any
from unittest.mock import Mock

import pytest
from support.in_process_server import make_client
from support.tenant_keys import bearer

from radixkv import LLM, AsyncLLM
from radixkv.prompts import Prompt
from radixkv.server import completions
from radixkv.server.access.tenants import Tenants
from radixkv.server.chat.prefix_keeper import PrefixKeeper
from radixkv.server.chat.prompt_caching import Breakpoint
from radixkv.server.chat.request import ChatCompletionRequest


async def test_after_each_long_text_of_one_request_others_have_their_turn(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All texts of a request used to be one job: 8 MB of them were tokenized before the few words of others."""
    order: list[str] = []
    as_prompts = completions.as_prompts

    def note(prompts: list[str], *arguments: Any, **options: Any) -> list[Prompt]:
        order.extend(prompt[0] for prompt in prompts)
        return as_prompts(prompts, *arguments, **options)

    monkeypatch.setattr(completions, "as_prompts", note)
    async with (
        AsyncLLM(llm) as engine,
        make_client(engine, tenants=Tenants(["ann", "bob"])) as client,
    ):
        asked: list[str] = []
        run_tokenizer = engine.run_tokenizer

        async def note_and_run(*arguments: Any, **options: Any) -> Any:
            asked.append(options["tenant"])
            return await run_tokenizer(*arguments, **options)

        engine.run_tokenizer = note_and_run  # type: ignore[method-assign]

        async def post(key: str, prompt: list[str]) -> None:
            await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}, headers=bearer(key))

        go = threading.Event()
        busy = asyncio.create_task(run_tokenizer(lambda _: go.wait(), num_slots=0))
        sent = []
        for key, prompt in (("ann", ["a " * 40_000] * 3), ("bob", ["b", "c"])):
            num_asked = len(asked)
            sent.append(asyncio.create_task(post(key, prompt)))
            while len(asked) == num_asked:
                await asyncio.sleep(0)
        go.set()
        await asyncio.gather(busy, *sent)
    assert order == ["a", "b", "c", "a", "a"]


async def test_the_prefixes_that_a_request_keeps_are_found_in_its_tenants_turn() -> None:
    """All tenants' prefixes used to share one queue: many requests of one with marks kept the others' from being found."""
    turns: list[str] = []

    async def run_tokenizer(function: Any, *, tenant: str, num_slots: int) -> dict[float, list[int]]:
        assert num_slots == 0  # the request has its queue slot already
        turns.append(tenant)
        return {}

    llm = Mock(run_tokenizer=run_tokenizer)
    keeper = PrefixKeeper(llm, "ann", ChatCompletionRequest(messages=[]), [Breakpoint([], 300.0)], Prompt([5, 6, 7]))
    keeper.begin()
    keeper.prompt_is_computed()
    assert await keeper.kept() == {}
    assert turns == ["ann"]
