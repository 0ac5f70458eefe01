"""The engine on a tiny model: the same tokens however work is cut up, shared or preempted; nothing leaks."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import Any
from unittest.mock import Mock

import pytest
from support.forked_child import refusals_in_a_fork
from support.model_zoo import VOCAB_SIZE, build_supported
from support.prompt_sets import GREEDY, shared_prefix_prompts, tokens_of
from support.tiny_engine import add, assert_empty, finish, raising_at, tiny

from radixkv import LLM, AsyncLLM, BeamSearchParams, Chat, SamplingParams
from radixkv.engine import engine as engine_module
from radixkv.engine.begin_request import begin_request
from radixkv.prompts import Prompt
from radixkv.scheduling.fair_shares import COMPUTED_TOKEN_COST, GENERATED_TOKEN_COST


@pytest.fixture(scope="module")
def expected() -> Callable[[int, int], list[list[int]]]:
    """What an engine without any cache answers, one request at a time."""
    llm = tiny(enable_prefix_caching=False, max_num_seqs=1)
    known: dict[tuple[int, int], list[list[int]]] = {}

    def of(seed: int, count: int) -> list[list[int]]:
        if (seed, count) not in known:
            known[seed, count] = tokens_of(llm, shared_prefix_prompts(seed, count))
        return known[seed, count]

    return of


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 7, 64])
@pytest.mark.parametrize("num_blocks_for", [100, pytest.param(260, marks=pytest.mark.slow), 2000])
def test_cached_and_uncached_runs_give_the_same_tokens(
    expected: Callable[[int, int], list[list[int]]], block_size: int, chunk: int, num_blocks_for: int
) -> None:
    num_blocks = -(-num_blocks_for // block_size) + 40 // block_size + 1
    llm = tiny(block_size=block_size, num_blocks=num_blocks, max_num_batched_tokens=chunk)
    rng = random.Random(block_size * chunk)
    # Token by token, a prompt takes as many steps as tokens, and half of the prompts fill the pool as often.
    count = 6 if chunk == 1 else 12
    for seed in (1, 2):
        prompts, answers = shared_prefix_prompts(seed, 12), expected(seed, 12)
        order = [
            i
            for i in rng.sample(range(12), count)
            if len(prompts[i]["prompt_token_ids"]) + 19 <= num_blocks * block_size
        ]
        assert tokens_of(llm, [prompts[i] for i in order]) == [answers[i] for i in order]
    stats = llm.engine.cache.stats
    assert stats.queried_tokens == stats.reused_tokens + stats.computed_tokens + stats.abandoned_tokens
    assert_empty(llm)


def test_preemption_changes_no_token(expected: Callable[[int, int], list[list[int]]]) -> None:
    llm = tiny(num_blocks=40)
    assert tokens_of(llm, shared_prefix_prompts(3, 10)) == expected(3, 10)
    assert llm.engine.scheduler.num_preemptions > 0
    assert llm.engine.cache.stats.evicted_blocks > 0
    assert_empty(llm)


@pytest.mark.parametrize("queue", ["running", "waiting"])
def test_what_was_cleared_is_not_cached_again_when_its_sequence_resumes(queue: str) -> None:
    """A preempted sequence got a new block table, which published all of it, down to disks and shared stores."""
    llm = tiny(num_blocks=20)
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=45, ignore_eos=True)
    add(engine, "first", range(5, 15), params)
    secret = engine.request_factory.make("secret", Prompt(list(range(50, 60)), namespace="secret"), params)
    engine.add(secret)
    engine.step()
    while not any(group.request is secret for group in getattr(engine.scheduler, queue)):
        engine.step()
    llm.reset_prefix_cache()
    finish(engine)
    assert engine.scheduler.num_preemptions > 0
    assert engine.cache.match(secret.sequences[0].token_ids, "secret") == 0
    tokens_of(llm, [{"prompt_token_ids": secret.prompt_token_list, "cache_salt": "secret"}])
    assert engine.cache.match(secret.prompt_token_list, "secret") == 10  # what is asked for later is cached


@pytest.mark.parametrize("caching", [True, False])
def test_beams_that_gave_way_find_room_again_when_their_prompt_is_no_longer_cached(caching: bool) -> None:
    """Separately, the three beams would need 39 blocks, of which there are 30: their common part is computed once."""
    engine = tiny(num_blocks=30, enable_prefix_caching=caching).engine
    params = BeamSearchParams(3, 20, ignore_eos=True)
    (prompt,) = shared_prefix_prompts(8, 1, longest=40)
    alone = tiny(num_blocks=30).engine
    answers = []
    for llm_engine in (alone, engine):
        if llm_engine is engine:
            older = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
            add(engine, "older", range(3, 43), older)
            engine.step()
        request = add(llm_engine, "beams", prompt["prompt_token_ids"], params)
        while llm_engine.has_unfinished_requests:
            llm_engine.step()
            llm_engine.cache.check()
        assert request.failure is None
        assert request.beam_search is not None
        answers.append([beam.token_ids for beam in request.beam_search.results()])
    assert engine.scheduler.num_preemptions > 0
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("seed", "answer", "before"), [(84, 213, 142), (5, 199, 115)])
def test_beams_of_which_some_were_evicted_while_others_were_opened_lose_no_blocks(
    seed: int, answer: int, before: int
) -> None:
    """Tables opened before the eviction used to be forgotten with their blocks, or a negative number of tokens computed."""
    draw = random.Random(seed)
    older, prompt = ({"prompt_token_ids": [draw.randrange(3, VOCAB_SIZE) for _ in range(count)]} for count in (8, 20))
    params = BeamSearchParams(beam_width=4, max_tokens=60, ignore_eos=True)
    alone, llm = (tiny(block_size=8, num_blocks=size, max_num_seqs=16) for size in (400, 35))
    (expected,) = alone.beam_search(prompt, params)
    stream = llm.stream(older, SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True))
    for _ in range(before):
        next(stream)
    (found,) = llm.beam_search(prompt, params)
    assert [beam.tokens for beam in found.sequences] == [beam.tokens for beam in expected.sequences]
    for _ in stream:
        pass
    assert llm.engine.scheduler.num_preemptions > 0
    assert_empty(llm)


def test_a_cold_burst_of_equal_prefixes_computes_them_once() -> None:
    llm = tiny(max_num_batched_tokens=32)
    stem = [random.Random(5).randrange(3, VOCAB_SIZE) for _ in range(160)]
    tokens_of(llm, [{"prompt_token_ids": [*stem, 10 + i]} for i in range(16)])
    stats = llm.engine.cache.stats
    assert stats.computed_tokens == 161 + 15
    assert stats.reused_tokens == 15 * 160


def test_one_new_token_leaves_its_prompt_in_the_cache() -> None:
    llm = tiny()
    (prompt,) = shared_prefix_prompts(1, 1)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    llm.generate(prompt, params, use_tqdm=False)
    assert llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens == 59


def test_a_hot_prefix_survives_a_full_pool() -> None:
    llm = tiny(num_blocks=60)
    hot = [random.Random(6).randrange(3, VOCAB_SIZE) for _ in range(40)]
    for number in range(12):
        cold = [random.Random(100 + number).randrange(3, VOCAB_SIZE) for _ in range(100)]
        tokens_of(llm, [{"prompt_token_ids": cold}])
        output = llm.generate({"prompt_token_ids": [*hot, number]}, GREEDY, use_tqdm=False)[0]
        assert output.num_cached_tokens == (40 if number else 0)


def test_samples_share_their_prompt_and_part_within_a_block() -> None:
    llm = tiny()
    prompt = {"prompt_token_ids": list(range(3, 45))}
    params = SamplingParams(n=6, temperature=1.5, seed=1, max_tokens=3, ignore_eos=True)
    outputs = llm.generate(prompt, params, use_tqdm=False)[0].outputs
    assert [output.index for output in outputs] == list(range(6))
    assert len({tuple(output.token_ids) for output in outputs}) > 1
    stats = llm.engine.cache.stats
    assert stats.computed_tokens == 42
    # 42 tokens fill ten blocks and half of one: five siblings copy that one, the last to part keeps it.
    assert stats.copied_blocks == 5


@pytest.mark.parametrize("params", [SamplingParams(n=3, max_tokens=5, ignore_eos=True), BeamSearchParams(3, 5, True)])
def test_a_tenant_is_charged_once_for_each_token_of_its_samples_and_beams(
    params: SamplingParams | BeamSearchParams,
) -> None:
    engine = tiny(async_scheduling=False).engine
    add(engine, "keeps the counters", [9], GREEDY)
    several = add(engine, "several", [3, 4, 5, 6], params, tenant="t")
    first_token_times = set()
    while not several.finished:
        engine.step()
        first_token_times.add(several.metrics.first_token_time)
    assert len(first_token_times) == 1
    assert engine.scheduler.shares.counter("t") == 3 * COMPUTED_TOKEN_COST + 3 * 5 * GENERATED_TOKEN_COST
    finish(engine)


def test_beams_stay_cached_to_their_last_computed_token() -> None:
    llm = tiny()
    (found,) = llm.beam_search({"prompt_token_ids": [3, 4, 5, 6, 7]}, BeamSearchParams(3, 5, ignore_eos=True))
    best = found.sequences[0].tokens
    (output,) = llm.generate({"prompt_token_ids": best}, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == len(best) - 1


def test_what_is_queued_for_tiers_has_some_seconds_however_short_the_grace_period(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, open_cache = tiny().engine, Mock()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_open_cache", open_cache)
        engine.close()
        engine.close(60.0)
    assert [call.args for call in open_cache.close.call_args_list] == [(engine_module._QUEUE_SECONDS,), (60.0,)]


def test_what_fails_in_a_step_without_requests_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny().engine
    monkeypatch.setattr(engine, "_execute", raising_at(1, OSError("no space left"), engine._execute))
    with pytest.raises(OSError, match="no space left"):
        engine.step()


def test_a_seed_gives_the_same_tokens_whatever_else_runs() -> None:
    params = SamplingParams(n=3, temperature=1.0, top_p=0.9, seed=42, max_tokens=20, ignore_eos=True)
    prompts = shared_prefix_prompts(8, 9)
    alone = tokens_of(tiny(enable_prefix_caching=False), prompts[4:5], params)
    others = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    for options in ({}, {"num_blocks": 60}, {"max_num_batched_tokens": 9}):
        llm = tiny(**options)
        outputs = llm.generate(prompts, [others] * 4 + [params] + [others] * 4, use_tqdm=False)
        assert [sample.token_ids for sample in outputs[4].outputs] == alone
        again = llm.generate(prompts[4], params, use_tqdm=False)[0]
        assert [sample.token_ids for sample in again.outputs] == alone


def test_a_refused_call_does_not_change_the_answers_to_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came before the refused prompt, or under a taken id, took the seeds that later requests would have had."""
    prompt = {"prompt_token_ids": [5, 6, 7]}
    drawn = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    expected = tokens_of(tiny(), [prompt], drawn)

    llm = tiny()
    with pytest.raises(ValueError, match="outside the vocabulary"):
        llm.generate([prompt, {"prompt_token_ids": [10**6]}], drawn, use_tqdm=False)
    llm.stream(prompt, drawn)  # never read
    assert tokens_of(llm, [prompt], drawn) == expected

    llm = tiny()
    greedy = SamplingParams(temperature=0.0, seed=0, max_tokens=8)
    add(llm.engine, "taken", [5, 6, 7], greedy)
    requests = [llm.engine.request_factory.make(name, Prompt([5, 6, 7]), drawn) for name in ("free", "taken")]
    with pytest.raises(ValueError, match="request_id 'taken' belongs to an unfinished request"):
        llm.engine.add(*requests)
    with pytest.raises(ValueError, match="request_id 'free' belongs to an unfinished request"):
        llm.engine.add(requests[0], requests[0])
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "begin_request", raising_at(2, RuntimeError("planted"), begin_request))
        with pytest.raises(RuntimeError, match="planted"):
            llm.engine.add(*(llm.engine.request_factory.make(name, Prompt([5]), drawn) for name in "ab"))
    finish(llm.engine)
    assert tokens_of(llm, [prompt], drawn) == expected
    assert_empty(llm)


def test_namespaces_and_switches_decide_what_is_reused() -> None:
    llm = tiny()
    (prompt,) = shared_prefix_prompts(1, 1)

    def cached(**options: Any) -> int:
        return llm.generate({**prompt, **options}, GREEDY, use_tqdm=False)[0].num_cached_tokens

    assert cached(cache={"write": False}) == 0
    assert cached() == 0
    assert cached() == 59
    assert cached(cache={"read": False}) == 0
    assert cached(cache_salt="another tenant") == 0
    assert cached(cache_salt="another tenant") == 59


@pytest.mark.parametrize(("policy", "num_cached"), [("priority", 19), ("lru", 16)])
def test_the_priority_policy_evicts_what_less_urgent_requests_used(policy: str, num_cached: int) -> None:
    """The urgent request's prompt is the least recently used, so LRU evicts its last blocks; priorities keep them."""
    llm = tiny(num_blocks=16, eviction_policy=policy)
    urgent, background, newest = ([5 + seed, *range(20, 39)] for seed in range(3))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for prompt, priority in ((urgent, -1), (background, 3), (newest, 3)):
        llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False, priority=priority)
    again = llm.generate({"prompt_token_ids": urgent}, params, use_tqdm=False, priority=-1)[0]
    assert again.num_cached_tokens == num_cached


def test_an_engine_of_another_process_is_refused_and_does_not_hang() -> None:
    """A forked child has none of OpenMP's threads, and used to wait for them."""
    llm = tiny()
    tokens_of(llm, shared_prefix_prompts(1, 1))
    (message,) = refusals_in_a_fork(lambda: tokens_of(llm, shared_prefix_prompts(1, 1)))
    assert f"made by process {os.getpid()}" in message


def test_what_cannot_be_sent_to_another_process_still_answers() -> None:
    """Half sent, its weights were in shared memory, and native code read them where they had been: the process crashed."""
    llm, (prompt,) = tiny(), shared_prefix_prompts(1, 1)
    expected = tokens_of(llm, [prompt])
    for whole in (llm, AsyncLLM(tiny()), Chat(llm), llm.engine.loaded.model):
        for send in (ForkingPickler.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match="LLM: cannot be copied, or sent to another process; make one in each"):
                send(whole)
    assert llm.reset_prefix_cache()
    assert tokens_of(llm, [prompt]) == expected


def test_a_stream_adds_up_to_the_answer() -> None:
    llm = tiny()
    (prompt,) = shared_prefix_prompts(1, 1)
    pieces = list(llm.stream(prompt, GREEDY))
    assert [t for piece in pieces for t in piece.outputs[0].token_ids] == tokens_of(llm, [prompt])[0]
    assert [piece.finished for piece in pieces] == [False] * 19 + [True]


def test_streams_that_advance_one_another_are_each_complete() -> None:
    llm = tiny()
    prompts = shared_prefix_prompts(8, 2)
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    pieces = [[next(stream)] for stream in streams]
    assert len(tokens_of(llm, shared_prefix_prompts(9, 1), SamplingParams(max_tokens=40, ignore_eos=True))) == 1
    for index, stream in enumerate(streams):
        pieces[index] += stream
    streamed = [[token for piece in of_one for token in piece.outputs[0].token_ids] for of_one in pieces]
    assert [of_one[-1].finished for of_one in pieces] == [True, True]
    assert streamed == tokens_of(llm, prompts)
    assert_empty(llm)


def test_threads_may_share_one_llm(expected: Callable[[int, int], list[list[int]]]) -> None:
    llm = tiny(num_blocks=300)  # so few that some are evicted
    wanted = [expected(number, 3) for number in range(8)]

    def answers(number: int) -> list[list[int]]:
        prompts = shared_prefix_prompts(number, 3)
        pieces = list(llm.stream(prompts[0], GREEDY))
        streamed = [token for piece in pieces for token in piece.outputs[0].token_ids]
        rest = llm.generate(prompts[1:], GREEDY, use_tqdm=False)
        llm.unpin(llm.pin(prompts[0]))
        return [streamed, *(output.outputs[0].token_ids for output in rest)]

    with ThreadPoolExecutor(max_workers=4) as threads:
        assert list(threads.map(answers, range(8))) == wanted
    assert llm.engine.cache.stats.evicted_blocks > 0
    assert_empty(llm)


def test_priorities_decide_who_is_answered_first() -> None:
    llm = tiny(max_num_seqs=1)
    finished: list[str] = []
    step = llm.engine.step

    def recorded() -> list[Any]:
        requests = step()
        finished.extend(request.request_id for request in requests if request.finished)
        return requests

    llm.engine.step = recorded  # type: ignore[method-assign]
    outputs = llm.generate(shared_prefix_prompts(4, 4), GREEDY, use_tqdm=False, priority=[3, 0, -1, 0])
    order = [outputs[index].request_id for index in (2, 1, 3, 0)]
    assert finished == order
    with pytest.raises(ValueError, match="priority: expected one for each of 4 prompts, got 2"):
        llm.generate(shared_prefix_prompts(4, 4), GREEDY, use_tqdm=False, priority=[1, 2])
    with pytest.raises(TypeError, match=r"priority: expected a whole number, got 1\.5"):
        llm.generate(shared_prefix_prompts(4, 4), GREEDY, use_tqdm=False, priority=1.5)  # type: ignore[arg-type]
    # Text is a sequence, too: "expected one for each of 4 prompts, got 4" said nothing.
    with pytest.raises(TypeError, match="priority: expected a whole number, got 'high'"):
        llm.generate(shared_prefix_prompts(4, 4), GREEDY, use_tqdm=False, priority="high")  # type: ignore[arg-type]
    assert_empty(llm)


def test_a_model_that_was_given_to_another_engine_is_that_ones() -> None:
    """It used to be reported as an error of the model's layers, two of which seemed to have the same index."""
    model = build_supported("llama")
    first, second = (LLM(model, block_size=4, num_blocks=40) for _ in range(2))
    prompts = shared_prefix_prompts(0, 2)
    answered = tokens_of(second, prompts)
    with pytest.raises(RuntimeError, match="model: it was given to another LLM since, which runs it now"):
        tokens_of(first, prompts)
    assert tokens_of(second, prompts) == answered
    assert_empty(first)
    assert_empty(second)
