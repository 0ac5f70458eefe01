"""Many streams over one engine thread: the same tokens as offline, nothing left behind however a stream ends."""

from __future__ import annotations

import asyncio
import copy
import random
import threading
from collections.abc import Iterable
from typing import Any

import pytest
from support.async_streams import ENDLESS, GREEDY, assert_empty, prompts, running_llm, tokens_of, until
from support.held_steps import HeldSteps
from support.replica_servers import tiny_llm
from support.time_limit import HANGING
from support.tiny_engine import tiny

from radixkv import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    CompletionOutput,
    RequestOutput,
    SamplingParams,
)
from radixkv.prompts import Prompt, as_prompts
from radixkv.tools.pieces import AnswerPiece, ParsedAnswer


async def test_64_streams_get_the_tokens_that_they_get_offline() -> None:
    expected = [
        [o.token_ids for o in output.outputs] for output in tiny().generate(prompts(64), GREEDY, use_tqdm=False)
    ]
    async with running_llm() as llm:
        assert await asyncio.gather(*(tokens_of(llm, prompt) for prompt in prompts(64))) == expected


async def test_samples_and_beams() -> None:
    sampled = SamplingParams(n=3, seed=5, max_tokens=9, ignore_eos=True)
    beams = BeamSearchParams(3, 6, ignore_eos=True)
    (prompt,) = prompts(1)
    offline = tiny()
    expected = [sample.token_ids for sample in offline.generate(prompt, sampled, use_tqdm=False)[0].outputs]
    found = offline.beam_search(prompt, beams)[0]
    async with running_llm() as llm:
        assert await tokens_of(llm, prompt, sampled) == expected
        assert (await llm.beam_search(prompt, beams)).sequences == found.sequences


async def test_beams_have_the_text_of_their_tokens_and_decode_their_prompt_once(default_tokenizer: Any) -> None:
    tokenizer = copy.copy(default_tokenizer)
    decoded: list[int] = []

    def decode(token_ids: Any, **options: Any) -> str:
        decoded.append(1 if isinstance(token_ids, int) else len(token_ids))
        return str(default_tokenizer.decode(token_ids, **options))

    tokenizer.decode = decode
    offline = tiny_llm(tokenizer)
    prompt = {"prompt_token_ids": list(range(500, 900))}
    params = BeamSearchParams(8, 4, ignore_eos=True)
    (found,) = offline.beam_search(prompt, params)
    assert len(found.sequences) == 8
    assert 400 < sum(decoded) < 800
    assert [beam.text for beam in found.sequences] == [
        default_tokenizer.decode(beam.tokens) for beam in found.sequences
    ]
    async with running_llm(offline) as llm:
        assert (await llm.beam_search(prompt, params)).sequences == found.sequences


async def test_a_slow_reader_gets_larger_pieces_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    offline = tiny()
    step, touched, is_first_read = offline.engine.step, [], threading.Event()
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=2)

    def step_once_the_first_piece_is_read() -> Any:
        if touched:
            assert is_first_read.wait(HANGING)
        requests = step()
        touched.extend(requests)
        return requests

    async with running_llm(offline) as llm:
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


def ends(outputs: Iterable[RequestOutput]) -> list[int]:
    return sorted(part.index for output in outputs for part in output.outputs if part.finished())


async def test_each_sample_ends_once(default_tokenizer: Any) -> None:
    """Its end was in all later outputs, too, and the whole answer to a chat was read again for each of them."""
    offline = tiny_llm(default_tokenizer, block_size=4)
    params = SamplingParams(n=3, seed=1, max_tokens=40, stop=["e"])
    whole = offline.generate("Who are you?", params, use_tqdm=False)[0].outputs
    shortest, *others = sorted(whole, key=lambda part: len(part.token_ids))
    assert len(shortest.token_ids) < len(others[0].token_ids)
    assert ends(offline.stream("Who are you?", params)) == [0, 1, 2]
    begun = [shortest, *(CompletionOutput(part.index, "", part.token_ids[:1]) for part in others)]
    resumed = list(offline.stream({"prompt": "Who are you?", "resume": begun}, params))
    assert ends(resumed) == [0, 1, 2]
    assert ends(resumed[:1]) == [shortest.index]
    async with running_llm(offline) as llm:
        assert ends([output async for output in llm.generate("Who are you?", params)]) == [0, 1, 2]
        (stream,) = await llm.submit(as_prompts("Who are you?", llm.loaded), params)
        await until(lambda: stream.ended)
        (all_at_once,) = [delta async for delta in stream]
        assert isinstance(all_at_once, RequestOutput)
        assert all_at_once.outputs == whole


def test_the_answer_to_each_sample_of_a_chat_is_read_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    answer_of = ParsedAnswer.of

    def counted(pieces: Iterable[AnswerPiece]) -> ParsedAnswer:
        made.append(answer_of(pieces))
        return made[-1]

    monkeypatch.setattr(ParsedAnswer, "of", counted)
    params = SamplingParams(n=3, seed=1, max_tokens=12, stop=["e"])
    outputs = list(llm.stream([{"role": "user", "content": "Who are you?"}], params))
    assert made == [part.answer for output in outputs for part in output.outputs if part.answer is not None]
    assert len(made) == 3


async def test_an_abandoned_stream_is_aborted_and_its_blocks_released() -> None:
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
        await until(lambda: llm.num_unfinished)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async with running_llm() as llm:
        for abandon in (left_early, closed, cancelled, cancelled_before_it_was_added):
            await abandon(llm)
            # A generator that is merely dropped is closed by the event loop, a little later.
            await until(lambda: not llm.num_unfinished)
            steps = await llm.call(lambda engine: engine.num_steps)
            await assert_empty(llm)
            assert await llm.call(lambda engine: engine.num_steps) - steps <= 1


async def test_an_id_can_be_given_again_as_soon_as_its_stream_is_closed() -> None:
    """The next request with that id gets nothing of the one before, which is aborted a step later."""
    offline = tiny()
    first, second = prompts(2)
    async with running_llm(offline) as llm:
        expected = await tokens_of(llm, second)
        stream = llm.generate(first, ENDLESS, "again")
        await anext(stream)
        steps = HeldSteps(offline.engine)
        await until(lambda: steps.is_holding)
        await stream.aclose()
        pieces: list[RequestOutput] = []

        async def read() -> None:
            async for piece in llm.generate(second, GREEDY, "again"):
                pieces.append(piece)

        reading = asyncio.create_task(read())
        await until(lambda: llm.num_unfinished)
        steps.allow_all()
        await reading
        assert {tuple(piece.prompt_token_ids) for piece in pieces} == {tuple(second["prompt_token_ids"])}
        assert [token for piece in pieces for token in piece.outputs[0].token_ids] == expected[0]
        assert pieces[-1].outputs[0].finish_reason == "length"


async def test_statistics_are_never_replaced_by_earlier_ones() -> None:
    """What a call saw before a step does not hide the step, however late its caller goes on."""
    offline = tiny(async_scheduling=False)
    steps = HeldSteps(offline.engine)
    async with running_llm(offline) as llm:
        answer = asyncio.create_task(
            tokens_of(llm, prompts(1)[0], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
        )
        await until(lambda: steps.is_holding)
        call = asyncio.create_task(llm.call(lambda engine: engine.num_steps))
        await asyncio.sleep(0)
        steps.allow_all()
        while offline.engine.has_unfinished_requests:  # the event loop does nothing else meanwhile
            pass
        assert await call == 1
        await answer
        assert (llm.stats.num_steps, llm.stats.num_running, llm.stats.num_blocks_in_use) == (2, 0, 0)


async def test_a_stream_tells_that_its_prompt_is_computed_before_the_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica looked once a second, so a prompt that its client left sooner was charged to nobody."""
    offline, may_compute = tiny(), threading.Event()
    execute = offline.engine._execute

    def held(*batches: Any) -> bool:
        assert may_compute.wait(HANGING)
        return execute(*batches)

    async with running_llm(offline) as llm:
        steps = await llm.call(HeldSteps)
        monkeypatch.setattr(offline.engine, "_execute", held)
        first, second = await llm.submit([Prompt([5, 6, 7]), Prompt([8, 9])], GREEDY)
        waiting = [asyncio.create_task(stream.wait_until_admitted()) for stream in (first, second)]
        for _ in range(100):
            await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        steps.allow(1)
        await asyncio.gather(*waiting)
        assert first.admitted
        assert not first.begun.is_set()
        may_compute.set()
        steps.allow_all()
        for stream in (first, second):
            assert [output async for output in stream][-1].finished
            await stream.wait_until_admitted()  # at once: it has ended


async def test_the_event_loop_never_waits_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    offline = tiny()
    release = threading.Event()
    step = offline.engine.step

    def slow_step() -> Any:
        assert release.wait(HANGING)
        return step()

    monkeypatch.setattr(offline.engine, "step", slow_step)
    async with running_llm(offline) as llm:
        first = asyncio.create_task(tokens_of(llm, prompts(2)[0]))
        await until(lambda: llm.num_unfinished)
        second = asyncio.create_task(tokens_of(llm, prompts(2)[1]))
        for _ in range(100):  # with the engine in the middle of its step
            await asyncio.sleep(0)
        release.set()
        assert len((await first)[0]) == len((await second)[0]) == 12


async def test_streams_that_come_and_go_at_random() -> None:
    async with running_llm(tiny(num_blocks=120, max_num_seqs=8)) as llm:
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
        await until(lambda: not llm.num_unfinished)


@pytest.mark.slow
async def test_chat_and_text(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Name a colour."}]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    expected = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
    async with running_llm(llm) as running:
        pieces = [output.outputs[0].text async for output in running.chat(messages, params)]
        assert "".join(pieces) == expected
        begun = [*messages, {"role": "assistant", "content": expected[:4]}]
        options = {"add_generation_prompt": False, "continue_final_message": True}
        prompts = [output.prompt async for output in running.chat(begun, params, **options)]
        assert prompts[-1] is not None
        assert prompts[-1].endswith(f"assistant\n{expected[:4]}")


async def test_what_an_async_llm_runs_nothing_else_may_run() -> None:
    """The engine used to die when it was called from two threads."""
    offline = tiny()
    (prompt,) = prompts(1)
    expected = offline.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    async with running_llm(offline) as llm:
        assert await tokens_of(llm, prompt) == [expected]
        with pytest.raises(RuntimeError, match="was given to an AsyncLLM that runs"):
            offline.generate(prompt, GREEDY, use_tqdm=False)
        with pytest.raises(RuntimeError, match="was given to an AsyncLLM that runs"):
            next(offline.stream(prompt, GREEDY))
        with pytest.raises(RuntimeError, match="one AsyncLLM at a time"):
            await tokens_of(AsyncLLM(offline), prompt)
        assert await tokens_of(llm, prompt) == [expected]
    assert offline.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected
