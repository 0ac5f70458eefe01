"""What a shutdown finishes and what it aborts, and what is given back at the end."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from support.async_streams import ENDLESS, GREEDY, prompts, running_llm, tokens_of, until
from support.time_limit import HANGING
from support.tiny_engine import tiny

from radixkv import AsyncLLM, SamplingParams, StructuredOutputsParams, TenantShare
from radixkv.engine.engine import Engine
from radixkv.errors import DrainingError, EngineDeadError
from radixkv.prompts import Prompt


async def test_a_shutdown_waits_for_no_thread_of_the_event_loop() -> None:
    """They may all hang in a store that does not answer, as explanations that ask the store do."""
    may_end = threading.Event()
    async with asyncio.timeout(HANGING):
        llm = AsyncLLM(tiny())
        await tokens_of(llm, prompts(1)[0])
        hanging = [asyncio.ensure_future(asyncio.to_thread(may_end.wait)) for _ in range(100)]
        await asyncio.sleep(0)
        assert await llm.shutdown()
        may_end.set()
        await asyncio.gather(*hanging)


@pytest.mark.usefixtures("loads_are_worth_it")
async def test_leaving_the_block_writes_what_is_cached(tmp_path: Path) -> None:
    (prompt,) = prompts(1)
    async with running_llm(tiny(disk_cache=tmp_path)) as llm:
        await tokens_of(llm, prompt)
    (output,) = tiny(disk_cache=tmp_path).generate(prompt, GREEDY, use_tqdm=False)
    assert output.metrics.loaded_tokens == {"disk": (len(prompt["prompt_token_ids"]) - 1) // 4 * 4}


async def test_an_engine_that_was_never_used_gives_its_disk_back(tmp_path: Path) -> None:
    """It kept the lock of the folder, and its threads, until it was collected."""
    async with asyncio.timeout(HANGING):
        llm = AsyncLLM(tiny(disk_cache=tmp_path))
        for _ in range(2):
            assert await llm.shutdown()
        async with AsyncLLM(tiny(disk_cache=tmp_path)):
            pass
        tiny(disk_cache=tmp_path).shutdown()


async def test_one_that_is_dropped_says_so_and_gives_its_engine_and_its_disk_back(tmp_path: Path) -> None:
    """Its thread kept it alive, and with it the pool and the lock of the folder, for as long as the process lived."""
    offline, (prompt,) = tiny(disk_cache=tmp_path), prompts(1)
    async with asyncio.timeout(HANGING):
        owned = [AsyncLLM(offline)]
        expected = await tokens_of(owned[0], prompt)
        thread, dropped = offline.engine.thread, weakref.ref(owned[0])
        assert thread is not None

        def is_over() -> bool:
            owned.clear()
            gc.collect()
            # Where the engine's thread dropped it last, another thread ends that one, and warns.
            return dropped() is None and not thread.is_alive()

        with pytest.warns(ResourceWarning, match="an AsyncLLM was dropped while its engine ran: await its shutdown"):
            await until(is_over)
        tiny(disk_cache=tmp_path).shutdown()
        async with AsyncLLM(offline) as another:
            assert await tokens_of(another, prompt) == expected


async def test_shutdown_lets_finish_what_can_in_time_and_aborts_the_rest() -> None:
    async with asyncio.timeout(HANGING):
        llm = AsyncLLM(tiny())
        short = asyncio.create_task(tokens_of(llm, prompts(1)[0]))
        await until(lambda: llm.num_unfinished)
        shutdown = asyncio.create_task(llm.shutdown(grace_seconds=60))
        await asyncio.sleep(0)
        with pytest.raises(DrainingError):
            await tokens_of(llm, prompts(1)[0])
        assert await shutdown
        assert len((await short)[0]) == 12

        llm = AsyncLLM(tiny())
        stream = llm.generate(prompts(1)[0], ENDLESS)
        await anext(stream)
        assert not await llm.shutdown()
        reasons = [output.outputs[0].finish_reason async for output in stream]
        assert reasons[-1] == "abort"
        assert not await llm.shutdown()
        with pytest.raises(DrainingError, match="the engine is finishing what it has, or was closed"):
            await tokens_of(llm, prompts(1)[0])


async def test_what_is_tokenized_when_a_shutdown_begins_is_refused_whatever_its_grace() -> None:
    """If it was the first request of all, it failed as if the engine had died."""
    may_end = threading.Event()
    async with asyncio.timeout(HANGING):
        llm = AsyncLLM(tiny())
        others = asyncio.create_task(llm.run_tokenizer(lambda _: may_end.wait(HANGING)))
        tokenized = asyncio.create_task(tokens_of(llm, prompts(1)[0]))
        await asyncio.sleep(0)
        assert await llm.shutdown(grace_seconds=HANGING)
        may_end.set()
        assert await others
        with pytest.raises(DrainingError, match="the engine is finishing what it has, or was closed"):
            await tokenized


async def test_what_is_prepared_when_the_threads_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where words were to be tokenized after its grammar, it failed with the threads' own error."""
    offline = tiny()
    compiling, may_end = threading.Event(), threading.Event()

    def hold(spec: Any) -> None:
        compiling.set()
        may_end.wait(HANGING)

    monkeypatch.setattr(offline.engine.grammars, "compile", hold)
    grammar = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), bad_words=["b"])
    async with asyncio.timeout(HANGING):
        llm = AsyncLLM(offline)
        prepared = asyncio.create_task(llm.submit([Prompt([5])], grammar))
        await asyncio.to_thread(compiling.wait, HANGING)
        await llm.shutdown()
        may_end.set()
        with pytest.raises(DrainingError, match="the engine is finishing what it has, or was closed"):
            await prepared


async def test_a_second_one_changes_nothing_and_does_not_hang() -> None:
    """It used to take the tenants' shares away from the first, and any second call on it never returned."""
    offline = tiny()
    async with running_llm(offline) as first:
        early = AsyncLLM(offline, tenants={"ann": TenantShare(weight=3.0)})
        await tokens_of(first, prompts(1)[0])
        with pytest.raises(RuntimeError, match="already in service"):
            AsyncLLM(offline)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="already in service"):
                await early.pins()
        await early.shutdown()
        assert offline.engine.scheduler.shares.share("ann").weight == 3.0
        await tokens_of(first, prompts(1)[0])


async def test_one_that_was_shut_down_before_it_ran_never_runs() -> None:
    """A later call used to start it, and its LLM could no longer be used."""
    offline = tiny()
    llm = AsyncLLM(offline)
    await llm.shutdown()
    with pytest.raises(EngineDeadError, match="the engine was stopped"):
        await llm.call(lambda engine: engine.num_steps)
    assert offline.generate(prompts(1), GREEDY, use_tqdm=False)


async def test_a_shutdown_does_not_wait_for_an_engine_that_is_abandoned_meanwhile() -> None:
    """After a second SIGTERM during a step that never ended, the server hung, though the step had a time limit."""
    offline = tiny()
    reached, may_end = threading.Event(), threading.Event()

    def hold(engine: Engine) -> None:
        reached.set()
        may_end.wait(HANGING)

    llm = AsyncLLM(offline)
    try:
        async with asyncio.timeout(HANGING):
            call = asyncio.create_task(llm.call(hold))
            await asyncio.to_thread(reached.wait, HANGING)
            shutdown = asyncio.create_task(llm.shutdown())
            await asyncio.sleep(0)
            llm.abandon("stuck")
            await shutdown
    finally:
        may_end.set()
    await call
    llm._engine_thread.stop(grace_seconds=0.0).result(HANGING)
