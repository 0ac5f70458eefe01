"""Who may wait in an engine's queue, and who comes first: full queues, tenants and priorities."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from support.async_streams import ENDLESS, GREEDY, prompts, running_llm, tokens_of, until
from support.held_steps import HeldSteps
from support.model_zoo import VOCAB_SIZE, build_supported
from support.time_limit import HANGING
from support.tiny_engine import add, finish, raising_at, tiny

from radixkv import AsyncLLM, BeamSearchParams, SamplingParams, StructuredOutputsParams, TenantShare
from radixkv.engine import engine as engine_module
from radixkv.engine.begin_request import begin_request
from radixkv.errors import QueueFullError, RequestTooLargeError
from radixkv.prompts import Prompt
from radixkv.scheduling.queue_slots import QueueSlots
from radixkv.serving.request_stream import RequestStream


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    async with running_llm(tiny(max_num_seqs=2), max_queue=3) as llm:
        release = threading.Event()
        blocked = asyncio.create_task(
            llm.call(lambda engine: release.wait(HANGING))
        )  # so that no request ends meanwhile
        tasks = [asyncio.create_task(tokens_of(llm, prompt)) for prompt in prompts(5)]
        await until(lambda: llm.num_unfinished >= 5)  # two that may run and three that may wait
        for _ in range(2):
            with pytest.raises(QueueFullError, match="5 requests are unfinished, and at most 5 may be") as refusal:
                await tokens_of(llm, prompts(1)[0])
            assert 1 <= refusal.value.retry_after <= 60
        tasks.pop().cancel()
        await until(lambda: llm.num_unfinished != 5)
        tasks.append(asyncio.create_task(tokens_of(llm, prompts(1)[0])))
        release.set()
        assert await blocked
        assert all(len(samples[0]) == 12 for samples in await asyncio.gather(*tasks))
        assert len((await tokens_of(llm, prompts(1)[0]))[0]) == 12


@pytest.mark.parametrize("max_queue", [-1, 1.5, True, "3"])
def test_an_impossible_limit_is_refused(max_queue: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"max_queue: expected a whole number of at least 0 or None, got {max_queue!r}"
    ):
        AsyncLLM(build_supported("llama"), max_queue=max_queue)


def test_unknown_options_are_refused_with_the_nearest_known_one() -> None:
    for wrong, right in (("max_queu", "max_queue"), ("block_sise", "block_size")):
        message = rf"AsyncLLM\.__init__\(\) got an unexpected keyword argument '{wrong}'\. Did you mean '{right}'\?"
        with pytest.raises(TypeError, match=message):
            AsyncLLM("/no/such/model", **{wrong: 3})


async def test_requests_submitted_together_are_refused_together(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = raising_at(3, MemoryError("planted"), begin_request)
    async with running_llm(tiny(max_num_seqs=2), max_queue=1) as llm:
        several = [Prompt([5, 6, 7]), Prompt([5, 6, VOCAB_SIZE])]
        with pytest.raises(ValueError, match="outside the vocabulary"):
            await llm.submit(several, GREEDY)
        with pytest.raises(ValueError, match="prompts: expected at most 3 in one request, got 4"):
            await llm.submit([Prompt([5, 6, 7])] * 4, GREEDY)
        streams = await llm.submit([Prompt([5, 6, 7])] * 2, GREEDY)
        with pytest.raises(QueueFullError, match="2 requests are unfinished, and at most 3 may be"):
            await llm.submit([Prompt([5, 6, 7])] * 2, GREEDY)
        for stream in streams:
            assert [piece async for piece in stream][-1].finished
        monkeypatch.setattr(engine_module, "begin_request", failing)
        with pytest.raises(MemoryError, match="planted"):
            await llm.submit([Prompt([5, 6, 7])] * 3, GREEDY)


async def test_who_tokenizes_or_compiles_a_grammar_has_a_place_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of requests could once wait for the one thread that tokenizes, or the one that compiles."""
    offline = tiny(max_num_seqs=2)
    go = threading.Event()
    monkeypatch.setattr(offline.engine.grammars, "compile", lambda spec: go.wait() and None)
    grammar = SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(regex="a"))
    async with running_llm(offline, max_queue=2) as llm:
        tokenizing = [asyncio.create_task(llm.run_tokenizer(lambda _: go.wait())) for _ in range(2)]
        compiling = [asyncio.create_task(llm.submit([Prompt([5])], grammar)) for _ in range(2)]
        await asyncio.sleep(0)
        for refused in (llm.run_tokenizer(lambda _: True), llm.submit([Prompt([5])], GREEDY)):
            with pytest.raises(QueueFullError, match="4 requests are unfinished"):
                await refused
        with pytest.raises(ValueError, match="at most 4 in one request, got 5"):
            await llm.run_tokenizer(lambda _: True, num_slots=5)
        assert not llm.num_unfinished
        has_its_place = asyncio.create_task(llm.run_tokenizer(lambda _: True, tenant="a", num_slots=0))
        go.set()
        assert await asyncio.gather(*tokenizing, has_its_place) == [True] * 3
        for (stream,) in await asyncio.gather(*compiling):
            async for _ in stream:
                pass
        assert len((await tokens_of(llm, prompts(1)[0]))[0]) == 12


async def test_one_tenant_s_burst_leaves_slots_for_others() -> None:
    async with running_llm(tiny(max_num_seqs=4), max_queue=12) as llm:

        async def submit(tenant: str) -> RequestStream:
            (stream,) = await llm.submit([Prompt([5, 6, 7])], ENDLESS, tenant=tenant)
            return stream

        streams = []
        with pytest.raises(QueueFullError, match="the remaining 4 queue slots are kept for others"):
            while True:
                streams.append(await submit("greedy"))
        assert len(streams) == 12
        with pytest.raises(ValueError, match="prompts: expected at most 12 in one request, got 13"):
            await llm.submit([Prompt([5])] * 13, ENDLESS, tenant="greedy")
        streams += [await submit("modest") for _ in range(3)]
        with pytest.raises(QueueFullError):
            await submit("greedy")
        for stream in streams:
            stream.close()
        # All slots are free again, and a tenant with a greater weight may have more.
        await llm.set_tenants({"greedy": TenantShare(3), "modest": TenantShare(1)})
        streams = [await submit("modest")]
        with pytest.raises(QueueFullError):
            while True:
                streams.append(await submit("greedy"))
        assert len(streams) == 14
        for stream in streams[1:]:
            stream.close()
        # At once, too: more than it may have where its weight counts for nothing, because nobody else is there.
        streams[1:] = await llm.submit([Prompt([5, 6, 7])] * 13, ENDLESS, tenant="greedy")
        for stream in streams:
            stream.close()


@pytest.mark.parametrize("of_others", range(1, 9))
def test_a_request_of_many_prompts_leaves_slots_for_others(of_others: int) -> None:
    """Only the slots that were free before it were looked at, so it could take them all."""
    together, one_by_one = (QueueSlots({"ann": TenantShare(2.0), "bob": TenantShare()}) for _ in range(2))
    for slots in (together, one_by_one):
        slots.take("bob", of_others)
    count = 0
    while one_by_one.refusal("ann", 1, 16) is None:
        one_by_one.take("ann", 1)
        count += 1
    assert together.refusal("ann", count, 16) is None
    assert "queue slots are kept for others" in (together.refusal("ann", count + 1, 16) or "")


def test_the_only_tenant_may_have_all_slots() -> None:
    slots = QueueSlots({})
    slots.take("", 3)
    assert slots.refusal("", 1, 4) is None
    assert "at most 4" in (slots.refusal("", 2, 4) or "")
    alone = QueueSlots({"ann": TenantShare()})
    alone.take("ann", 3)
    assert alone.refusal("ann", 1, 4) is None
    several = QueueSlots({"ann": TenantShare(), "bob": TenantShare()})
    several.take("ann", 3)
    assert "kept for others" in (several.refusal("ann", 1, 4) or "")
    assert several.refusal("bob", 1, 4) is None


@pytest.mark.parametrize("tenant", ["", "modest"])
def test_a_long_stream_and_many_samples_do_not_stop_admission(tenant: str) -> None:
    """One tenant has both, with eight slots: seven used to be idle for as long as the stream went on. Counted in steps."""
    engine = tiny(max_num_seqs=8).engine
    tokens = [7, 8, 9, 10, 11]

    stream = add(engine, "stream", tokens, ENDLESS)
    engine.step()
    many = add(engine, "many", tokens, SamplingParams(n=8, max_tokens=4, ignore_eos=True))
    for number in range(5):
        short = add(engine, f"short-{number}", tokens, SamplingParams(max_tokens=1), tenant=tenant)
        steps = engine.num_steps
        while not short.finished:
            engine.step()
        assert engine.num_steps - steps == 1
    assert many.num_cached_tokens is None
    assert not stream.finished
    engine.abort("stream")
    while not many.finished:
        engine.step()
    engine.cache.check()


async def test_more_samples_or_beams_than_a_request_may_have_are_refused() -> None:
    async with running_llm(
        tiny(max_num_seqs=8), max_seqs_per_request=4, tenants={"small": TenantShare(max_num_seqs=2)}
    ) as llm:
        for params, name in ((SamplingParams(n=5), "n"), (BeamSearchParams(5, 3), "beam_width")):
            with pytest.raises(RequestTooLargeError, match=f"^{name}: expected at most 4 .*, got 5"):
                await llm.submit([Prompt([5, 6])], params)
        with pytest.raises(RequestTooLargeError, match="n: expected at most 2, the tenant's limit, got 3"):
            await llm.submit([Prompt([5, 6])], SamplingParams(n=3), tenant="small")


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_request_preempted_for_another_tenant_continues_with_the_same_tokens(async_scheduling: bool) -> None:
    expected = [o.outputs[0].token_ids for o in tiny().generate(prompts(12), GREEDY, use_tqdm=False)]
    engine = tiny(max_num_seqs=4, async_scheduling=async_scheduling).engine
    requests = []
    for number, prompt in enumerate(prompts(12)):
        if number == 8:
            for _ in range(7):
                engine.step()
        tenant = "greedy" if number < 8 else "modest"
        requests.append(add(engine, f"{number}", prompt["prompt_token_ids"], GREEDY, tenant=tenant))
    finish(engine)
    assert engine.scheduler.num_preemptions >= 2
    assert [request.sequences[0].output_token_ids for request in requests] == expected
    engine.cache.check()


async def test_a_lower_priority_is_admitted_earlier() -> None:
    offline = tiny(max_num_seqs=1)
    steps = HeldSteps(offline.engine)
    async with running_llm(offline) as llm:
        ended = []

        async def ask(name: str, priority: int) -> None:
            async for _ in llm.generate(prompts(1)[0], GREEDY, name, priority=priority):
                pass
            ended.append(name)

        asking = []
        for name, priority in (("running", 0), ("late", 5), ("early", -5)):
            asking.append(asyncio.create_task(ask(name, priority)))
            await until(lambda: llm.num_unfinished >= len(asking))
            if name == "running":
                steps.allow(1)
                await until(lambda: llm.stats.num_running)
        steps.allow_all()
        await asyncio.gather(*asking)
        assert ended == ["running", "early", "late"]
