"""Steps that crash, engines that die, and requests and engines that cannot begin."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from support.async_streams import ENDLESS, GREEDY, assert_empty, prompts, running_llm, tokens_of, until
from support.dict_tier import DictTier
from support.forked_child import refusals_in_a_fork
from support.held_steps import HeldSteps
from support.time_limit import HANGING
from support.tiny_engine import raising_at, tiny

from radixkv import AsyncLLM, SamplingParams
from radixkv.engine import engine as engine_module
from radixkv.engine import executor, output_processor
from radixkv.errors import EngineDeadError, StepFailedError
from radixkv.tiers.stats import StoreStats


@pytest.mark.parametrize("where", ["model", "sampling"])
async def test_a_crash_fails_only_the_requests_of_its_step(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    expected = [
        [o.token_ids for o in output.outputs] for output in tiny().generate(prompts(10), GREEDY, use_tqdm=False)
    ]
    offline = tiny(max_num_seqs=4)
    owner, name = (offline.engine._runner, "run") if where == "model" else (executor, "InFlightTokens")
    monkeypatch.setattr(owner, name, raising_at(6, ZeroDivisionError("planted"), getattr(owner, name)))
    steps = HeldSteps(offline.engine)
    async with running_llm(offline) as llm:
        answers = [asyncio.create_task(tokens_of(llm, prompt)) for prompt in prompts(10)]
        await until(lambda: llm.num_unfinished >= len(answers))  # in the sixth step, as many run as may
        steps.allow_all()
        results = await asyncio.gather(*answers, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        assert len(failures) == 4
        assert all(isinstance(failure, StepFailedError) for failure in failures)
        assert isinstance(failures[0].__cause__, ZeroDivisionError)
        # What the crashed step left in the cache is right: all get the tokens of an engine that never crashed.
        assert await asyncio.gather(*(tokens_of(llm, prompt) for prompt in prompts(10))) == expected


async def test_what_finished_in_a_step_that_crashed_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """With asynchronous scheduling, a step processes the batch before, and only then, perhaps, its own."""
    (first, second) = prompts(2)
    one_token = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    (expected,) = tiny().generate([first], one_token, use_tqdm=False)

    def planted(*_: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(output_processor, "sample", planted)  # on the host, as log-probabilities need it
    offline = tiny(async_scheduling=True)
    steps = HeldSteps(offline.engine)
    async with running_llm(offline) as llm:
        finishes = asyncio.create_task(tokens_of(llm, first, one_token))
        await until(lambda: steps.is_holding)
        steps.allow(1)  # its token is on its way when the other one comes
        await until(lambda: llm.num_unfinished >= 1 and steps.is_holding)
        fails = asyncio.create_task(tokens_of(llm, second, SamplingParams(temperature=0.0, max_tokens=4, logprobs=1)))
        await until(lambda: llm.num_unfinished >= 2)
        steps.allow_all()
        assert await finishes == [expected.outputs[0].token_ids]
        with pytest.raises(StepFailedError):
            await fails


async def test_a_request_that_cannot_begin_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_once = raising_at(1, RuntimeError("planted"), engine_module.begin_request)
    monkeypatch.setattr(engine_module, "begin_request", failing_once)
    async with running_llm() as llm:
        with pytest.raises(RuntimeError, match="planted"):
            await tokens_of(llm, prompts(1)[0])
        await assert_empty(llm)
        assert len((await tokens_of(llm, prompts(1)[0]))[0]) == 12


async def test_a_full_disk_ends_a_recording_and_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    offline = tiny(record_trace=tmp_path / "trace.jsonl")
    recorder = offline.engine._requests._recorder
    assert recorder is not None
    recorder._file = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115 (the recorder closes it)
    async with running_llm(offline) as llm:
        answers = await asyncio.gather(*(tokens_of(llm, prompt) for prompt in prompts(3)))
        assert [len(answer[0]) for answer in answers] == [12] * 3
    assert [record.message for record in caplog.records if "record_trace" in record.message] == [
        f"record_trace: {tmp_path / 'trace.jsonl'} cannot be written ([Errno 28] No space left on device); "
        "nothing more is recorded"
    ]


@pytest.mark.parametrize(
    ("salt", "tenant", "message"),
    [
        ("a\ud83d", "", "cache_salt: character 1 is half of a surrogate pair"),
        ("", 5, "tenant: expected a string, got 5"),
        ("", None, "tenant: expected a string, got None"),
    ],
)
async def test_an_impossible_request_is_refused_and_the_engine_lives(salt: str, tenant: Any, message: str) -> None:
    async with running_llm(tiny()) as llm:
        (prompt,) = prompts(1)
        with pytest.raises((TypeError, ValueError), match=message):
            async for _ in llm.generate({**prompt, "cache_salt": salt}, GREEDY, tenant=tenant):
                pass
        assert llm.death is None
        assert await tokens_of(llm, prompt)


async def test_a_dead_engine_fails_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    offline = tiny()

    def broken() -> Any:
        raise ZeroDivisionError("planted")

    async with asyncio.timeout(HANGING):
        llm = AsyncLLM(offline)
        stream = llm.generate(prompts(1)[0], ENDLESS)
        await anext(stream)
        await llm.call(lambda engine: monkeypatch.setattr(engine.scheduler, "schedule", broken))
        with pytest.raises(EngineDeadError, match="planted"):
            async for _ in stream:
                pass
        assert await llm.wait_for_death() is llm.death
        with pytest.raises(EngineDeadError, match="planted"):
            await tokens_of(llm, prompts(1)[0])
        with pytest.raises(EngineDeadError):
            await llm.call(lambda engine: None)
        await llm.shutdown()
        with pytest.raises(EngineDeadError, match="planted"):
            await tokens_of(llm, prompts(1)[0])


async def test_a_gpu_that_no_step_can_use_any_more_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step crashed, for ever, and the server was healthy; as the least loaded replica, it got most of the requests."""
    offline = tiny()
    failed = RuntimeError("CUDA error: an illegal memory access was encountered")

    def run_there(*_: Any) -> Any:
        monkeypatch.setattr(offline.engine._runner, "_device", torch.device("cuda"))
        raise failed

    def synchronize(device: torch.device) -> None:
        raise failed

    monkeypatch.setattr(offline.engine._runner, "run", run_there)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    async with asyncio.timeout(HANGING):
        llm = AsyncLLM(offline)
        with pytest.raises(EngineDeadError, match="illegal memory access"):
            await tokens_of(llm, prompts(1)[0])
        assert llm.death is not None
        await llm.shutdown()


@pytest.mark.usefixtures("loads_are_worth_it")
async def test_a_dead_engine_gives_its_disk_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the process ended, nothing else could write there. What is cached may be why it died, and is not written."""
    offline, (prompt,) = tiny(disk_cache=tmp_path), prompts(1)
    async with asyncio.timeout(HANGING):
        llm = AsyncLLM(offline)
        await tokens_of(llm, prompt)
        monkeypatch.setattr(offline.engine, "step", raising_at(1, ZeroDivisionError("planted"), offline.engine.step))
        with pytest.raises(EngineDeadError, match="planted"):
            await tokens_of(llm, prompt)
        await llm.shutdown(HANGING)
    with tiny(disk_cache=tmp_path) as llm:
        assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


async def test_a_store_whose_counters_cannot_be_read_ends_no_engine() -> None:
    """They are read after every step, and the engine died of what the store raised then."""

    class Gone(DictTier):
        is_gone = False

        @property
        def stats(self) -> StoreStats:
            if self.is_gone:
                raise ConnectionError("the store is gone")
            return super().stats

    store = Gone()
    async with running_llm(tiny(tiers=[store])) as llm:
        store.is_gone = True
        assert len((await tokens_of(llm, prompts(1)[0]))[0]) == 12
        assert llm.death is None


def test_an_llm_with_a_stream_left_open_is_refused_until_that_is_closed() -> None:
    """The engine died of its first step, whose result had no loop to go to; closing the stream later broke into a step."""
    offline, (prompt,) = tiny(), prompts(1)
    expected = offline.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    early = AsyncLLM(offline)
    stream = offline.stream(prompt, ENDLESS)
    next(stream)

    async def use(llm: AsyncLLM) -> list[list[int]]:
        async with llm:
            return await tokens_of(llm, prompt)

    with pytest.raises(
        RuntimeError, match="the LLM has unfinished requests: read its streams to their end, or close them"
    ):
        AsyncLLM(offline)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the LLM has unfinished requests"):
            asyncio.run(tokens_of(early, prompt))
    stream.close()
    assert asyncio.run(use(early)) == [expected]


async def test_a_stream_that_is_refused_leaves_the_running_engine_alone() -> None:
    """It used to abort the AsyncLLM's request that had its id, from another thread."""
    offline, (prompt,) = tiny(), prompts(1)
    async with running_llm(offline) as llm:
        refused = offline.stream(prompt, GREEDY)  # its id is "0", too
        running = llm.generate(prompt, ENDLESS, request_id="0")
        await anext(running)
        with pytest.raises(RuntimeError, match="given to an AsyncLLM"):
            next(refused)
        assert [output async for output in running][-1].outputs[0].finish_reason == "length"


def test_an_engine_of_another_process_is_refused_and_does_not_hang() -> None:
    """A forked child has none of the engine's threads, and used to wait for them."""
    offline, (prompt,) = tiny(), prompts(1)
    unused, used = AsyncLLM(tiny()), AsyncLLM(tiny())

    def in_a_loop(call: Coroutine[Any, Any, object]) -> None:
        asyncio.run(asyncio.wait_for(call, HANGING))

    with asyncio.Runner() as runner:
        runner.run(tokens_of(used, prompt))
        messages = refusals_in_a_fork(
            lambda: in_a_loop(tokens_of(unused, prompt)),
            lambda: in_a_loop(tokens_of(used, prompt)),
            lambda: in_a_loop(used.shutdown()),
            lambda: in_a_loop(AsyncLLM(offline).shutdown()),
        )
        runner.run(used.shutdown())
    assert len(messages) == 4
    assert all(f"made by process {os.getpid()}" in message for message in messages)


async def test_an_error_without_words_is_told_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    offline = tiny()
    monkeypatch.setattr(offline.engine, "step", raising_at(1, AssertionError(), offline.engine.step))
    async with asyncio.timeout(HANGING):
        with pytest.raises(EngineDeadError, match=r"the engine is dead: AssertionError\(\)"):
            await tokens_of(AsyncLLM(offline), prompts(1)[0])


@pytest.mark.parametrize(
    ("wrong", "error"),
    [({"record_trace": "/nonexistent/trace.jsonl"}, OSError), ({"speculative_config": {"drafters": [5]}}, TypeError)],
)
def test_an_engine_that_cannot_be_made_releases_its_folder(wrong: dict[str, Any], error: Any, tmp_path: Path) -> None:
    """The error's traceback holds the engine: as long as it existed, the folder was in use by this process."""
    with pytest.raises(error) as raised:
        tiny(disk_cache=tmp_path, **wrong)
    assert raised.traceback
    tiny(disk_cache=tmp_path).generate(prompts(1), GREEDY, use_tqdm=False)
