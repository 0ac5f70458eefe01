"""Many streams over one engine thread: the same tokens as offline, nothing left behind however a stream ends."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.model_zoo import VOCAB_SIZE, build_supported

from radixkv import LLM, AsyncLLM, BeamSearchParams, SamplingParams, StructuredOutputsParams, TenantShare
from radixkv.engine import executor
from radixkv.engine.engine import Engine
from radixkv.engine.request_stream import RequestStream
from radixkv.errors import DrainingError, EngineDeadError, QueueFullError, RequestTooLargeError, StepFailedError
from radixkv.prompts import Prompt
from radixkv.scheduling.queue_places import QueuePlaces
from radixkv.scheduling.request import Request

ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
# Seconds after which something hangs, on however busy a machine.
HANGING = 600
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def prompts(count: int, length: int = 30) -> list[dict[str, Any]]:
    rng = random.Random(length)
    stem = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
    return [{"prompt_token_ids": [*stem[: rng.randint(1, length)], 3 + number % 100]} for number in range(count)]


def tiny(**options: Any) -> LLM:
    return LLM(build_supported("llama"), **{"block_size": 4, "num_blocks": 600, **options})


def run(test: Callable[[AsyncLLM], Awaitable[None]], offline: LLM | None = None, **options: Any) -> None:
    """Run a test on an AsyncLLM in an event loop of its own; afterwards nothing may be left in the engine."""

    async def main() -> None:
        async with AsyncLLM(offline or tiny(), **options) as llm:
            await test(llm)
            await assert_empty(llm)

    asyncio.run(asyncio.wait_for(main(), HANGING))


async def assert_empty(llm: AsyncLLM) -> None:
    def look(engine: Engine) -> tuple[bool, int]:
        engine.cache.check()
        in_use = engine.cache.num_blocks - engine.cache.num_available_blocks
        return engine.has_unfinished_requests or bool(engine.scheduler.running or engine.scheduler.waiting), in_use

    assert await llm.call(look) == (False, 0)
    assert llm.num_unfinished == 0


async def tokens_of(llm: AsyncLLM, prompt: Any, params: SamplingParams = GREEDY) -> list[list[int]]:
    samples: dict[int, list[int]] = {}
    async for output in llm.generate(prompt, params):
        for sample in output.outputs:
            samples.setdefault(sample.index, []).extend(sample.token_ids)
    return [samples[index] for index in sorted(samples)]


def test_64_streams_get_the_tokens_that_they_get_offline() -> None:
    expected = [
        [o.token_ids for o in output.outputs] for output in tiny().generate(prompts(64), GREEDY, use_tqdm=False)
    ]

    async def test(llm: AsyncLLM) -> None:
        assert await asyncio.gather(*(tokens_of(llm, prompt) for prompt in prompts(64))) == expected

    run(test)


def test_samples_and_beams() -> None:
    sampled = SamplingParams(n=3, seed=5, max_tokens=9, ignore_eos=True)
    beams = BeamSearchParams(3, 6, ignore_eos=True)
    (prompt,) = prompts(1)
    offline = tiny()
    expected = [sample.token_ids for sample in offline.generate(prompt, sampled, use_tqdm=False)[0].outputs]
    found = offline.beam_search(prompt, beams)[0]

    async def test(llm: AsyncLLM) -> None:
        assert await tokens_of(llm, prompt, sampled) == expected
        assert (await llm.beam_search(prompt, beams)).sequences == found.sequences

    run(test)


def test_a_slow_reader_gets_larger_pieces_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    offline = tiny()
    step, touched, is_first_read = offline.engine.step, [], threading.Event()
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=2)

    def step_once_the_first_piece_is_read() -> Any:
        if touched:
            assert is_first_read.wait(HANGING)
        requests = step()
        touched.extend(requests)
        return requests

    async def test(llm: AsyncLLM) -> None:
        (prompt,) = prompts(1)
        expected = await tokens_of(llm, prompt, params)
        monkeypatch.setattr(offline.engine, "step", step_once_the_first_piece_is_read)
        pieces = []
        async for output in llm.generate(prompt, params):
            if not pieces:
                is_first_read.set()
                while await llm.call(lambda engine: engine.has_unfinished_requests):
                    pass
            pieces.append(output)
        assert len(pieces) == 2
        assert [t for piece in pieces for t in piece.outputs[0].token_ids] == expected[0]
        assert [len(piece.outputs[0].logprobs or ()) for piece in pieces] == [1, 39]

    run(test, offline)


def test_an_abandoned_stream_is_aborted_and_its_blocks_released() -> None:
    async def left_early(llm: AsyncLLM) -> None:
        async for _ in llm.generate(prompts(1)[0], ENDLESS):
            break

    async def closed(llm: AsyncLLM) -> None:
        stream = llm.generate(prompts(1)[0], ENDLESS)
        await anext(stream)
        await stream.aclose()

    async def cancelled(llm: AsyncLLM) -> None:
        started = asyncio.Event()

        async def read() -> None:
            async for _ in llm.generate(prompts(1)[0], ENDLESS):
                started.set()

        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def cancelled_before_it_was_added(llm: AsyncLLM) -> None:
        task = asyncio.create_task(tokens_of(llm, prompts(1)[0], ENDLESS))
        while not llm.num_unfinished:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test(llm: AsyncLLM) -> None:
        for abandon in (left_early, closed, cancelled, cancelled_before_it_was_added):
            await abandon(llm)
            while llm.num_unfinished:  # a generator that is merely dropped is closed by the event loop, a little later
                await asyncio.sleep(0)
            steps = await llm.call(lambda engine: engine.num_steps)
            await assert_empty(llm)
            assert await llm.call(lambda engine: engine.num_steps) - steps <= 1

    run(test)


def test_abort_ends_the_iteration() -> None:
    async def test(llm: AsyncLLM) -> None:
        reasons = []
        async for output in llm.generate(prompts(1)[0], ENDLESS, "mine"):
            llm.abort("mine")
            reasons.append(output.outputs[0].finish_reason)
        assert reasons[-1] == "abort"
        assert set(reasons[:-1]) == {None}
        search = asyncio.create_task(llm.beam_search(prompts(1)[0], BeamSearchParams(2, 300, ignore_eos=True), "beams"))
        while not llm.stats.num_running:
            await asyncio.sleep(0)
        llm.abort("beams")
        assert (await search).sequences == []
        llm.abort("no such request")

    run(test)


def test_the_event_loop_never_waits_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny()
    release = threading.Event()
    step = llm.engine.step

    def slow_step() -> Any:
        assert release.wait(HANGING)
        return step()

    monkeypatch.setattr(llm.engine, "step", slow_step)

    async def test(llm: AsyncLLM) -> None:
        first = asyncio.create_task(tokens_of(llm, prompts(2)[0]))
        while not llm.num_unfinished:
            await asyncio.sleep(0)
        second = asyncio.create_task(tokens_of(llm, prompts(2)[1]))
        for _ in range(100):  # with the engine in the middle of its step
            await asyncio.sleep(0)
        release.set()
        assert len((await first)[0]) == len((await second)[0]) == 12

    run(test, llm)


def test_bad_requests_are_refused_and_disturb_no_other() -> None:
    async def test(llm: AsyncLLM) -> None:
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

    run(test)


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    async def test(llm: AsyncLLM) -> None:
        release = threading.Event()
        blocked = asyncio.create_task(llm.call(lambda engine: release.wait(60)))  # so that no request ends meanwhile
        tasks = [asyncio.create_task(tokens_of(llm, prompt)) for prompt in prompts(5)]
        while llm.num_unfinished < 5:  # two that may run and three that may wait
            await asyncio.sleep(0)
        for _ in range(2):
            with pytest.raises(QueueFullError, match="5 requests are unfinished, and at most 5 may be") as refusal:
                await tokens_of(llm, prompts(1)[0])
            assert 1 <= refusal.value.retry_after <= 60
        tasks.pop().cancel()
        while llm.num_unfinished == 5:
            await asyncio.sleep(0)
        tasks.append(asyncio.create_task(tokens_of(llm, prompts(1)[0])))
        release.set()
        assert await blocked
        assert all(len(samples[0]) == 12 for samples in await asyncio.gather(*tasks))
        assert len((await tokens_of(llm, prompts(1)[0]))[0]) == 12

    run(test, tiny(max_num_seqs=2), max_queue=3)


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


def test_requests_submitted_together_are_refused_together(monkeypatch: pytest.MonkeyPatch) -> None:
    offline = tiny(max_num_seqs=2)
    add = offline.engine.add
    added = []

    def add_two(request: Any) -> None:
        if len(added) == 2:
            raise MemoryError("planted")
        added.append(request)
        add(request)

    async def test(llm: AsyncLLM) -> None:
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
        monkeypatch.setattr(offline.engine, "add", add_two)
        with pytest.raises(MemoryError, match="planted"):
            await llm.submit([Prompt([5, 6, 7])] * 3, GREEDY)
        assert len(added) == 2

    run(test, offline, max_queue=1)


def test_who_tokenizes_or_compiles_a_grammar_has_a_place_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of requests could wait for the one thread that tokenizes, and for the one that compiles."""
    offline = tiny(max_num_seqs=2)
    go = threading.Event()
    monkeypatch.setattr(offline.engine.grammars, "compile", lambda spec: go.wait() and None)
    grammar = SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(regex="a"))

    async def test(llm: AsyncLLM) -> None:
        tokenizing = [asyncio.create_task(llm.run_tokenizer(lambda _: go.wait())) for _ in range(2)]
        compiling = [asyncio.create_task(llm.submit([Prompt([5])], grammar)) for _ in range(2)]
        await asyncio.sleep(0)
        for refused in (llm.run_tokenizer(lambda _: True), llm.submit([Prompt([5])], GREEDY)):
            with pytest.raises(QueueFullError, match="4 requests are unfinished"):
                await refused
        with pytest.raises(ValueError, match="at most 4 in one request, got 5"):
            await llm.run_tokenizer(lambda _: True, num_prompts=5)
        assert not llm.num_unfinished
        unbounded = asyncio.create_task(llm.run_tokenizer(lambda _: True, tenant=None))
        go.set()
        assert await asyncio.gather(*tokenizing, unbounded) == [True] * 3
        for (stream,) in await asyncio.gather(*compiling):
            async for _ in stream:
                pass
        assert len((await tokens_of(llm, prompts(1)[0]))[0]) == 12

    run(test, offline, max_queue=2)


def test_one_tenant_s_burst_leaves_places_for_others() -> None:
    async def test(llm: AsyncLLM) -> None:
        async def submit(tenant: str) -> RequestStream:
            (stream,) = await llm.submit([Prompt([5, 6, 7])], ENDLESS, tenant=tenant)
            return stream

        streams = []
        with pytest.raises(QueueFullError, match="the remaining 4 places are kept for others"):
            while True:
                streams.append(await submit("greedy"))
        assert len(streams) == 12
        streams += [await submit("modest") for _ in range(3)]
        with pytest.raises(QueueFullError):
            await submit("greedy")
        for stream in streams:
            stream.close()
        # All is free again, and who has a greater weight may have more.
        await llm.set_tenants({"greedy": TenantShare(3), "modest": TenantShare(1)})
        streams = [await submit("modest")]
        with pytest.raises(QueueFullError):
            while True:
                streams.append(await submit("greedy"))
        assert len(streams) == 14
        for stream in streams:
            stream.close()

    run(test, tiny(max_num_seqs=4), max_queue=12)


def test_the_only_tenant_may_have_all_places() -> None:
    places = QueuePlaces(4, {})
    places.take("", 3)
    assert places.refusal("", 1) is None
    assert "at most 4" in (places.refusal("", 2) or "")
    alone = QueuePlaces(4, {"ann": TenantShare()})
    alone.take("ann", 3)
    assert alone.refusal("ann", 1) is None
    several = QueuePlaces(4, {"ann": TenantShare(), "bob": TenantShare()})
    several.take("ann", 3)
    assert "kept for others" in (several.refusal("ann", 1) or "")
    assert several.refusal("bob", 1) is None


@pytest.mark.parametrize("tenant", ["", "modest"])
def test_a_long_stream_and_many_samples_do_not_stop_admission(tenant: str) -> None:
    """With eight slots, both of one tenant: seven slots were idle for as long as the stream went on. In steps."""
    engine = tiny(max_num_seqs=8).engine
    tokens = [7, 8, 9, 10, 11]

    def add(name: str, params: SamplingParams, tenant: str) -> Request:
        request = engine.make_request(name, tokens, params, tenant=tenant)
        engine.add(request)
        return request

    stream = add("stream", ENDLESS, "")
    engine.step()
    many = add("many", SamplingParams(n=8, max_tokens=4, ignore_eos=True), "")
    for number in range(5):
        short = add(f"short-{number}", SamplingParams(max_tokens=1), tenant)
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


def test_more_samples_or_beams_than_a_request_may_have_are_refused() -> None:
    async def test(llm: AsyncLLM) -> None:
        for params, name in ((SamplingParams(n=5), "n"), (BeamSearchParams(5, 3), "beam_width")):
            with pytest.raises(RequestTooLargeError, match=f"^{name}: expected at most 4 .*, got 5"):
                await llm.submit([Prompt([5, 6])], params)
        with pytest.raises(RequestTooLargeError, match="n: expected at most 2, the tenant's limit, got 3"):
            await llm.submit([Prompt([5, 6])], SamplingParams(n=3), tenant="small")

    run(test, tiny(max_num_seqs=8), max_seqs_per_request=4, tenants={"small": TenantShare(max_num_seqs=2)})


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_who_gives_way_to_another_tenant_goes_on_as_if_nothing_had_been(async_scheduling: bool) -> None:
    expected = [o.outputs[0].token_ids for o in tiny().generate(prompts(12), GREEDY, use_tqdm=False)]
    engine = tiny(max_num_seqs=4, async_scheduling=async_scheduling).engine
    requests = []
    for number, prompt in enumerate(prompts(12)):
        if number == 8:
            for _ in range(7):
                engine.step()
        tenant = "greedy" if number < 8 else "modest"
        requests.append(engine.make_request(f"{number}", prompt["prompt_token_ids"], GREEDY, tenant=tenant))
        engine.add(requests[-1])
    while engine.has_unfinished_requests:
        engine.step()
    assert engine.scheduler.num_preemptions >= 2
    assert [request.sequences[0].output_token_ids for request in requests] == expected
    engine.cache.check()


def test_a_lower_priority_is_admitted_earlier() -> None:
    async def test(llm: AsyncLLM) -> None:
        ended = []

        async def ask(name: str, priority: int) -> None:
            async for _ in llm.generate(prompts(1)[0], GREEDY, name, priority=priority):
                pass
            ended.append(name)

        first = asyncio.create_task(ask("running", 0))
        while not llm.stats.num_running:
            await asyncio.sleep(0)
        late = asyncio.create_task(ask("late", 5))
        while llm.num_unfinished < 2:
            await asyncio.sleep(0)
        await asyncio.gather(first, late, ask("early", -5))
        assert ended == ["running", "early", "late"]

    run(test, tiny(max_num_seqs=1))


@pytest.mark.parametrize("where", ["model", "sampling"])
def test_a_crash_fails_only_the_requests_of_its_step(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    expected = [
        [o.token_ids for o in output.outputs] for output in tiny().generate(prompts(10), GREEDY, use_tqdm=False)
    ]
    offline = tiny(max_num_seqs=4)
    owner, name = (offline.engine._runner, "run") if where == "model" else (executor, "InFlightTokens")
    original = getattr(owner, name)
    calls = 0

    def crash_once(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise ZeroDivisionError("planted")
        return original(*arguments)

    monkeypatch.setattr(owner, name, crash_once)

    async def test(llm: AsyncLLM) -> None:
        results = await asyncio.gather(*(tokens_of(llm, prompt) for prompt in prompts(10)), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        assert len(failures) == 4
        assert all(isinstance(failure, StepFailedError) for failure in failures)
        assert isinstance(failures[0].__cause__, ZeroDivisionError)
        # What the crashed step left in the cache is right: all get the tokens of an engine that never crashed.
        assert await asyncio.gather(*(tokens_of(llm, prompt) for prompt in prompts(10))) == expected

    run(test, offline)


def test_a_dead_engine_fails_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    offline = tiny()

    def broken() -> Any:
        raise ZeroDivisionError("planted")

    async def main() -> None:
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

    asyncio.run(asyncio.wait_for(main(), HANGING))


def test_shutdown_lets_finish_what_can_in_time_and_aborts_the_rest() -> None:
    async def main() -> None:
        llm = AsyncLLM(tiny())
        short = asyncio.create_task(tokens_of(llm, prompts(1)[0]))
        while not llm.num_unfinished:
            await asyncio.sleep(0)
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
        with pytest.raises(DrainingError):
            await tokens_of(llm, prompts(1)[0])

    asyncio.run(asyncio.wait_for(main(), HANGING))


def test_streams_that_come_and_go_at_random() -> None:
    async def test(llm: AsyncLLM) -> None:
        rng = random.Random(11)

        async def visitor(number: int) -> None:
            params = rng.choice(
                [GREEDY, ENDLESS, SamplingParams(n=3, max_tokens=20, ignore_eos=True), SamplingParams(max_tokens=1)]
            )
            patience = rng.choice([0, 1, 3, 10, 10**9 if params is not ENDLESS else 5])
            async for _ in llm.generate(rng.choice(prompts(20)), params, f"{number}"):
                patience -= 1
                if patience < 0:
                    return

        tasks = [asyncio.create_task(visitor(number)) for number in range(150)]
        for task in rng.sample(tasks, 40):
            for _ in range(rng.randint(0, 30)):
                await asyncio.sleep(0)
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        while llm.num_unfinished:
            await asyncio.sleep(0)

    run(test, tiny(num_blocks=120, max_num_seqs=8))


@pytest.mark.slow
def test_chat_and_text_on_the_default_model(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Name a colour."}]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    expected = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text

    async def test(llm: AsyncLLM) -> None:
        pieces = [output.outputs[0].text async for output in llm.chat(messages, params)]
        assert "".join(pieces) == expected
        begun = [*messages, {"role": "assistant", "content": expected[:4]}]
        options = {"add_generation_prompt": False, "continue_final_message": True}
        prompts = [output.prompt async for output in llm.chat(begun, params, **options)]
        assert prompts[-1] is not None
        assert prompts[-1].endswith(f"assistant\n{expected[:4]}")

    run(test, llm)
