"""An answer that is continued after any of its tokens is the answer that an undisturbed run gives."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any, cast

import pytest
from support.prompt_sets import tokens_of
from support.tiny_engine import add, tiny

from radixkv import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    CompletionOutput,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from radixkv.engine import resumption
from radixkv.engine.request_output import request_output
from radixkv.outputs import FinishReason
from radixkv.prompts import Prompt

PROMPT = "The three largest cities of France are"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "rank": {"type": "integer"}},
    "required": ["city", "rank"],
    "additionalProperties": False,
}
CASES: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0, max_tokens=10, logprobs=1),
    "sampled": SamplingParams(n=2, seed=3, max_tokens=7, top_p=0.9, logprobs=2, prompt_logprobs=1),
    # At this temperature most tokens are parts of characters.
    "characters": SamplingParams(seed=8, temperature=3.0, max_tokens=15),
    "penalties": SamplingParams(
        seed=5, max_tokens=10, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7, bad_words=["city"]
    ),
    "min_tokens": SamplingParams(temperature=0, max_tokens=12, min_tokens=6, stop=["a"]),
    "schema": SamplingParams(seed=1, max_tokens=40, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
}
STOPS = {
    "left out": SamplingParams(temperature=0, max_tokens=14, stop=["ance, and Ly", "France, or"]),
    "included": SamplingParams(temperature=0, max_tokens=14, stop=["ance, and"], include_stop_str_in_output=True),
}


def merge(pieces: list[RequestOutput], n: int) -> list[CompletionOutput]:
    """What a reader has of each sample after these pieces."""
    merged = [CompletionOutput(index, "", [], logprobs=[]) for index in range(n)]
    for piece in pieces:
        for part in piece.outputs:
            merged[part.index].extend(part)
    return merged


def assert_continues(
    before: list[CompletionOutput], rest: list[CompletionOutput], whole: list[CompletionOutput]
) -> None:
    for first, second, expected in zip(before, rest, whole, strict=True):
        assert first.text + second.text == expected.text
        assert first.token_ids + second.token_ids == expected.token_ids
        assert (second.finish_reason, second.stop_reason) == (expected.finish_reason, expected.stop_reason)
        logprobs = (first.logprobs or []) + (second.logprobs or [])
        assert [list(entry) for entry in logprobs] == [list(entry) for entry in expected.logprobs or []]
        # A prompt and the tokens after it are computed in different batches: additions have a different order.
        values = [entry[token].logprob for entry, token in zip(logprobs, expected.token_ids, strict=False)]
        known = [
            entry[token].logprob for entry, token in zip(expected.logprobs or [], expected.token_ids, strict=False)
        ]
        assert values == pytest.approx(known, abs=1e-3)
        assert (second.cumulative_logprob or 0.0) == pytest.approx(expected.cumulative_logprob or 0.0, abs=1e-2)


@pytest.mark.parametrize("case", CASES)
def test_the_rest_is_the_same_after_each_token(request: pytest.FixtureRequest, case: str) -> None:
    # A random model's tokens are so certain that penalties change none.
    llm: LLM = request.getfixturevalue("default_llm" if case in ("penalties", "min_tokens") else "llm")
    check_rests(llm, CASES[case], every=4 if case == "schema" else 1)


@pytest.mark.parametrize("case", STOPS)
def test_the_rest_stops_at_what_began_before_it(default_llm: LLM, case: str) -> None:
    check_rests(default_llm, STOPS[case], every=1)


def check_rests(llm: LLM, params: SamplingParams, every: int) -> None:
    pieces = list(llm.stream(PROMPT, params))
    whole = merge(pieces, params.n)
    received = [merge(pieces[:count], params.n) for count in range(0, len(pieces) + 1, every)]
    assert not params.stop or whole[0].finish_reason == "stop"
    llm.reset_prefix_cache()
    prompts = [{"prompt": PROMPT, "resume": outputs} for outputs in received]
    results = llm.generate(prompts, params, use_tqdm=False)
    for before, result in zip(received, results, strict=True):
        assert_continues(before, result.outputs, whole)
        assert (result.prompt_logprobs is None) == (params.prompt_logprobs is None or before != received[0])


def test_samples_that_have_ended_stay_ended_and_the_others_go_on(default_llm: LLM) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=12, stop=[" a", " the"])
    pieces = list(default_llm.stream(PROMPT, params))
    whole = merge(pieces, 3)
    lengths = [len(output.token_ids) for output in whole]
    assert len(set(lengths)) > 1
    before = merge(pieces[: min(lengths)], 3)
    assert {output.finish_reason is None for output in before} == {True, False}

    async def rest() -> list[CompletionOutput]:
        async with AsyncLLM(default_llm) as engine:
            outputs = [output async for output in engine.generate({"prompt": PROMPT, "resume": before}, params)]
            return merge(outputs, 3)

    after = [replace(output, logprobs=None, cumulative_logprob=None) for output in asyncio.run(rest())]
    assert_continues(before, after, whole)


def test_a_resumed_answer_survives_preemption() -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts: list[Any] = [{"prompt_token_ids": [3 + number, 7, 9, 11, 13]} for number in range(6)]
    whole = tokens_of(tiny(), prompts, params)
    for prompt, tokens in zip(prompts, whole, strict=True):
        prompt["resume"] = [CompletionOutput(0, "", tokens[:6])]
    small = tiny(num_blocks=14)
    assert tokens_of(small, prompts, params) == [tokens[6:] for tokens in whole]
    assert small.engine.scheduler.num_preemptions > 0


GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.mark.parametrize(
    ("params", "outputs", "message"),
    [
        (BeamSearchParams(2, 4), [CompletionOutput(0, "", [5])], "a beam search cannot be resumed"),
        (SamplingParams(), [CompletionOutput(0, "", [5])], "expected params with a seed"),
        (GREEDY, [CompletionOutput(1, "", [5])], r"for each of n=1 samples, got those of \[1\]"),
        (GREEDY, [CompletionOutput(0, "", [5]), CompletionOutput(0, "", [5])], r"got those of \[0, 0\]"),
        (
            GREEDY,
            [CompletionOutput(0, "", [5, 200])],
            "sample 0: expected token ids of the vocabulary of 200 tokens, got 200",
        ),
        (GREEDY, [CompletionOutput(0, "", [5, cast(Any, 1.5)])], "of the vocabulary of 200 tokens, got 1.5"),
        (GREEDY, [CompletionOutput(0, "", [5] * 5)], "sample 0: expected at most 4 tokens, got 5"),
        (
            replace(GREEDY, stop_token_ids=[7]),
            [CompletionOutput(0, "", [7, 5])],
            "sample 0: expected 1 tokens, with which it had ended, got 2",
        ),
        (replace(GREEDY, logprobs=1), [CompletionOutput(0, "", [5])], "expected its cumulative_logprob"),
        (
            replace(GREEDY, logprobs=1),
            [CompletionOutput(0, "", [5], cast(Any, "low"))],
            "expected a number as cumulative_logprob, got 'low'",
        ),
        (
            GREEDY,
            [CompletionOutput(0, "", [5], finish_reason="tired")],
            "expected stop, length, abort or None as finish_reason, got 'tired'",
        ),
    ],
)
def test_what_cannot_be_resumed_is_refused(params: Any, outputs: list[CompletionOutput], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny().engine.request_factory.make("a", Prompt([4, 5], resume=outputs), params)


@pytest.mark.parametrize(
    ("tokens", "reason", "expected"), [([6] * 4, None, "length"), ([6, 7], "stop", "stop"), ([], "stop", "stop")]
)
def test_an_answer_that_has_ended_stays_as_it_is(tokens: list[int], reason: FinishReason | None, expected: str) -> None:
    begun = CompletionOutput(0, "", tokens, finish_reason=reason)
    request = tiny().engine.request_factory.make("a", Prompt([4, 5], resume=[begun]), GREEDY)
    assert [(each.output_token_ids, each.finish_reason) for each in request.sequences] == [(tokens, expected)]


def test_tokens_that_the_grammar_forbids_are_refused(llm: LLM) -> None:
    params = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    (token_id,) = llm.get_tokenizer().encode("Paris")[:1]
    with pytest.raises(ValueError, match="sample 0: token 1 is not what structured_outputs allow"):
        llm.generate({"prompt": PROMPT, "resume": [CompletionOutput(0, "", [token_id])]}, params, use_tqdm=False)


def test_resume_takes_outputs_only(llm: LLM) -> None:
    with pytest.raises(TypeError, match="'resume' must be a list of CompletionOutput, got"):
        llm.generate({"prompt": PROMPT, "resume": [[1, 2]]}, GREEDY, use_tqdm=False)


def test_cached_tokens_are_the_prompt_s_alone() -> None:
    llm = tiny()
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompt: Any = {"prompt_token_ids": [4, 5, 6]}
    (whole,) = llm.generate([prompt], params, use_tqdm=False)
    begun = replace(whole.outputs[0], token_ids=whole.outputs[0].token_ids[:20], finish_reason=None, text="")
    (rest,) = llm.generate([{**prompt, "resume": [begun]}], params, use_tqdm=False)
    assert rest.num_cached_tokens == 3
    assert rest.outputs[0].token_ids == whole.outputs[0].token_ids[20:]


def test_a_long_answer_is_not_replayed_on_the_engine_s_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, it used to hold up the steps of all other streams."""
    llm = tiny()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (whole,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    begun = CompletionOutput(0, "", whole.outputs[0].token_ids[:5], 0.0)
    replay, threads = resumption._replay, []

    def noting(*arguments: Any) -> None:
        threads.append(threading.current_thread().name)
        replay(*arguments)

    monkeypatch.setattr(resumption, "_replay", noting)

    async def main() -> list[int]:
        async with AsyncLLM(llm) as engine:
            (stream,) = await engine.submit([Prompt([5, 6, 7], resume=[begun])], params)
            return [token_id async for delta in stream for token_id in delta.outputs[0].token_ids]

    assert asyncio.run(main()) == whole.outputs[0].token_ids[5:]
    assert threads
    assert not any("engine" in name for name in threads)


def test_what_was_aborted_before_its_first_token_gets_its_prompts_logprobs() -> None:
    """They used to count as given with a first token that never came."""
    llm = tiny(max_num_batched_tokens=8)
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0, prompt_logprobs=1, n=1)
    prompt = list(range(3, 30))
    request = add(llm.engine, "aborted", prompt, params)
    llm.engine.step()
    llm.engine.abort("aborted")
    aborted = request_output(request)
    assert [(output.token_ids, output.finish_reason) for output in aborted.outputs] == [([], "abort")]
    (resumed,) = llm.generate({"prompt_token_ids": prompt, "resume": aborted.outputs}, params, use_tqdm=False)
    (fresh,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    assert resumed.prompt_logprobs is not None
    assert fresh.prompt_logprobs is not None
    assert len(resumed.prompt_logprobs) == len(fresh.prompt_logprobs) == len(prompt)
    assert resumed.outputs[0].token_ids == fresh.outputs[0].token_ids
