"""Drafts change how many tokens a step brings, and not one token; what is rejected leaves no trace."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.drafters import Guesser, Oracle, speculator, use_ticks
from support.model_zoo import VOCAB_SIZE, build_supported

from radixkv import LLM, SamplingParams, StructuredOutputsParams
from radixkv.cache import EventLog
from radixkv.cache.event_recorder import EventRecorder
from radixkv.drafting import Draft, Drafter
from radixkv.drafting.sources import GrammarDrafter, PrefixDrafter, SuffixDrafter
from radixkv.prompts import Prompt
from radixkv.scheduling.batch import Batch
from radixkv.scheduling.request import Request

SMALL: dict[str, Any] = {"block_size": 4, "num_blocks": 40, "max_num_seqs": 5, "max_num_batched_tokens": 24}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 5, "min_p": 0.01},
    {"temperature": 0.7, "n": 3},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"temperature": 0.8, "repetition_penalty": 1.3},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 1.0, "min_tokens": 4},
    {"temperature": 0.0, "stop_token_ids": list(range(0, VOCAB_SIZE, 7))},
    {"temperature": 0.9, "logit_bias": {5: 3.0, 6: -100.0}, "allowed_token_ids": list(range(0, VOCAB_SIZE, 3))},
]
Work = list[tuple[list[int], SamplingParams]]


@st.composite
def work(draw: st.DrawFn) -> Work:
    """Requests with common prefixes, some of them asked twice."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 5)))
    stem = torch.randint(3, VOCAB_SIZE, (30,), generator=generator).tolist()
    requests = []
    for number in range(draw(st.integers(1, 7))):
        prompt = [*stem[: draw(st.integers(1, 30))], 3 + number % 2, *stem[: draw(st.integers(0, 6))]]
        kind = draw(st.sampled_from(KINDS))
        length = draw(st.integers(kind.get("min_tokens", 1), 20))
        params = SamplingParams(max_tokens=length, seed=number, ignore_eos=draw(st.booleans()), **kind)
        requests += [(prompt, params)] * draw(st.integers(1, 2))
    return requests


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(build_supported("llama"), **SMALL)


def drafting(drafters: Sequence[Drafter] = (), architecture: str = "llama", **options: Any) -> LLM:
    config = {"method": "tree", "num_speculative_tokens": 6, "drafters": drafters}
    llm = LLM(build_supported(architecture), speculative_config=config, **{**SMALL, **options})
    use_ticks(llm)
    return llm


def answers(llm: LLM, requests: Work) -> list[Any]:
    """All that must not depend on drafts."""
    llm.reset_prefix_cache()
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in requests], [params for _, params in requests], use_tqdm=False
    )
    llm.engine.cache.check()
    assert llm.engine.cache.num_evictable_blocks == llm.engine.cache.num_held_blocks
    assert llm.reset_prefix_cache()
    return [
        [
            (sample.token_ids, sample.finish_reason, sample.stop_reason, _rounded(sample.logprobs), of_prompt)
            for sample in output.outputs
        ]
        for output in outputs
        for of_prompt in [_rounded([each for each in output.prompt_logprobs or [] if each])]
    ]


def _rounded(logprobs: Any) -> Any:
    return logprobs and [
        {i: (pytest.approx(p.logprob, abs=1e-3), p.rank) for i, p in each.items()} for each in logprobs
    ]


def num_drafts(llm: LLM) -> tuple[int, int]:
    counts = llm.engine.draft_counts.values()
    return sum(c.drafted for c in counts), sum(c.accepted for c in counts)


@pytest.fixture(scope="module", params=[False, True], ids=["in order", "launched ahead"])
def drafter(request: pytest.FixtureRequest) -> tuple[LLM, Oracle]:
    oracle = Oracle(error_rate=0.2, vocab_size=VOCAB_SIZE)
    return drafting([oracle, Guesser(1, VOCAB_SIZE)], async_scheduling=request.param), oracle


@settings(max_examples=12, deadline=None)
@given(requests=work())
def test_tokens_are_those_without_drafts(plain: LLM, drafter: tuple[LLM, Oracle], requests: Work) -> None:
    """Also with so few blocks that sequences are preempted, and with drafts of every kind of error."""
    llm, oracle = drafter
    expected = answers(plain, requests)
    oracle.sequences = [
        [*prompt, *tokens] for (prompt, _), samples in zip(requests, expected, strict=True) for tokens, *_ in samples
    ]
    assert answers(llm, requests) == expected


def test_drafts_were_accepted_and_rejected(drafter: tuple[LLM, Oracle], plain: LLM) -> None:
    """The property above says something: drafts of all kinds went through the model, and saved steps."""
    llm, oracle = drafter
    requests: Work = [([5, 6, 7, 8], SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True))]
    oracle.sequences = [[5, 6, 7, 8, *answers(plain, requests)[0][0][0]]]
    before, steps = num_drafts(llm), llm.engine.num_steps
    assert answers(llm, requests)[0][0][0] == oracle.sequences[0][4:]
    drafted, accepted = num_drafts(llm)
    assert 0 < accepted - before[1] < drafted - before[0]
    assert llm.engine.num_steps - steps < 40


def test_log_probabilities_of_prompts_are_those_without_drafts(drafter: tuple[LLM, Oracle], plain: LLM) -> None:
    """The rows of a prompt's last chunk are the prompt's, and no draft's."""
    llm, oracle = drafter
    for length in (3, 8, 30):
        prompt = list(range(5, 5 + length))
        params = SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=2, logprobs=1, ignore_eos=True)
        expected = answers(plain, [(prompt, params)] * 2)
        oracle.sequences = [[*prompt, *expected[0][0][0]]]
        assert answers(llm, [(prompt, params)] * 2) == expected


def test_tokens_are_those_without_drafts_in_fp8() -> None:
    """What is rejected had been written with the same scales, and is written over."""
    oracle = Oracle(error_rate=0.3, vocab_size=VOCAB_SIZE)
    fp8 = LLM(build_supported("llama"), kv_cache_dtype="fp8", **SMALL)
    llm = drafting([oracle], kv_cache_dtype="fp8")
    requests: Work = [
        ([5, 6, 7, 8, number], SamplingParams(temperature=t, seed=number, max_tokens=30, ignore_eos=True))
        for number, t in enumerate((0.0, 0.8, 1.0))
    ]
    expected = [answers(fp8, [request])[0] for request in requests]
    oracle.sequences = [[*p, *samples[0][0]] for (p, _), samples in zip(requests, expected, strict=True)]
    assert [answers(llm, [request])[0] for request in requests] == expected
    drafted, accepted = num_drafts(llm)
    assert 0 < accepted < drafted


def test_drafts_take_no_more_rows_than_a_batch_may_have(plain: LLM) -> None:
    """Six for each of five sequences would be more than 24 tokens."""
    oracle = Oracle()
    llm = drafting([oracle], num_blocks=100)
    requests: Work = [
        ([5, 6, number], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)) for number in range(5)
    ]
    expected = [answers(plain, [request])[0] for request in requests]
    oracle.sequences = [[*p, *samples[0][0]] for (p, _), samples in zip(requests, expected, strict=True)]
    sizes: list[int] = []
    drafts = llm.engine._speculator
    assert drafts is not None
    draft = drafts.draft

    def noting(batch: Batch) -> None:
        draft(batch)
        sizes.append(sum(chunk.num_tokens for chunk in batch.chunks) + sum(map(len, batch.drafts.values())))

    drafts.draft = noting  # type: ignore[method-assign]
    assert answers(llm, requests) == expected
    assert 20 <= max(sizes) <= SMALL["max_num_batched_tokens"]


@pytest.mark.parametrize("architecture", ["gemma2", "gpt2", "mixtral", "deepseek_v3", "gpt_oss", "qwen3"])
def test_other_architectures(architecture: str) -> None:
    """Windows, softcaps, sinks, learned positions, experts, latent attention."""
    oracle = Oracle(error_rate=0.1, vocab_size=VOCAB_SIZE)
    llm = drafting([oracle], architecture)
    requests: Work = [
        ([9, 8, 7, *range(20, 20 + number)], SamplingParams(temperature=t, seed=number, max_tokens=24, ignore_eos=True))
        for number, t in enumerate((0.0, 0.7, 1.0))
    ]
    drafts, llm.engine._speculator = llm.engine._speculator, None
    expected = answers(llm, requests)
    llm.engine._speculator = drafts
    oracle.sequences = [[*p, *samples[0][0]] for (p, _), samples in zip(requests, expected, strict=True)]
    assert answers(llm, requests) == expected
    assert num_drafts(llm)[1] > 20


@pytest.mark.parametrize("ahead", [False, True], ids=["in order", "launched ahead"])
def test_what_a_step_takes_is_learned_from_steps_without_drafts_too(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launched ahead, only the steps with drafts were: what they cost more was not known."""
    llm = drafting(async_scheduling=ahead)
    assert llm.engine._speculator is not None
    llm.engine._speculator._drafters = []
    learned: list[tuple[int, float]] = []
    monkeypatch.setattr(
        llm.engine._speculator._times, "observe", lambda rows, seconds, drafting: learned.append((rows, seconds))
    )
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [7, 8, number]} for number in range(3)], params, use_tqdm=False)
    decoding = [seconds for rows, seconds in learned if rows == 3]
    assert 30 <= len(decoding) <= 39
    assert min(decoding) > 0


def test_what_was_said_before_is_drafted_from_the_tree() -> None:
    """The same question again takes a fraction of the steps; another tenant's answer is never a draft."""
    llm = drafting(num_blocks=200)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=48, ignore_eos=True)

    def steps(namespace: str) -> tuple[int, Any]:
        before = llm.engine.num_steps
        (output,) = llm.generate({"prompt_token_ids": [4, 5, 6], "cache_salt": namespace}, params, use_tqdm=False)
        return llm.engine.num_steps - before, output

    first, output = steps("ann")
    again, repeated = steps("ann")
    elsewhere, stranger = steps("ben")
    assert output.outputs[0].token_ids == repeated.outputs[0].token_ids == stranger.outputs[0].token_ids
    assert again <= 48 // 7 + 2
    assert elsewhere == first
    assert repeated.metrics.drafts["prefix"].accepted >= 40
    assert "prefix" not in stranger.metrics.drafts


def test_a_rejected_draft_leaves_no_trace() -> None:
    """Events, counters, blocks and the tree are, after every step, those of the same sequence without drafts."""
    histories = []
    for with_drafts in (False, True):
        llm = drafting([Guesser(2, VOCAB_SIZE, bad=False)], num_blocks=20)
        engine, cache = llm.engine, llm.engine.cache
        if not with_drafts:
            engine._speculator = None
        events = EventLog(medium="CPU")
        _record(cache, events)
        history = {}
        for number in range(4):
            params = SamplingParams(temperature=1.0, seed=number, max_tokens=30, ignore_eos=True)
            request = engine.request_factory.make(f"r{number}", Prompt([7, 7, number, 9]), params)
            engine.add(request)
            while engine.has_unfinished_requests:
                engine.step()
                tokens = tuple(request.sequences[0].token_ids)
                # Where several tokens came at once, only the last one's state exists.
                blocks = cache.num_held_blocks, cache.num_evictable_blocks, cache.match(tokens)
                history[tokens] = cache.stats, blocks
                cache.check()
        if with_drafts:
            drafted, accepted = num_drafts(llm)
            assert drafted > 100 > accepted
        histories.append((history, events.take()))
    (plain_history, plain_events), (history, drafted_events) = histories
    assert drafted_events == plain_events
    assert history.items() <= plain_history.items()


def test_a_batch_says_that_it_decodes_whatever_drafts_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """By that a GPU tells long drafts from prompts."""
    llm = drafting([Guesser(2, VOCAB_SIZE, bad=False)])
    seen: list[tuple[bool, list[int]]] = []
    run = llm.engine._runner.run

    def noting(model_input: Any, *args: Any) -> torch.Tensor:
        seen.append((model_input.queries.decodes, model_input.queries.num_new.tolist()))
        return run(model_input, *args)

    monkeypatch.setattr(llm.engine._runner, "run", noting)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    llm.generate({"prompt_token_ids": [7, 7, 8, 9]}, params, use_tqdm=False)
    assert not seen[0][0]
    assert all(decodes for decodes, _ in seen[1:])
    assert max(count for _, counts in seen[1:] for count in counts) > 1


def _record(cache: Any, events: EventLog) -> None:
    recorder = EventRecorder(events, cache.block_size)
    cache._tree._on_insert += (recorder.on_insert,)
    cache._tree._on_remove += (recorder.on_remove,)


NO_LISTS: dict[str, Any] = {
    "an empty array": np.array([], dtype=int),
    "an empty tensor": torch.tensor([], dtype=torch.int64),
    "an array": np.array([VOCAB_SIZE + 1]),
    "a set": {VOCAB_SIZE},
    "text": "no",
    "floats": [1.0],
    "nothing": None,
}


@pytest.mark.parametrize("guesses", ["raises", "too many", "outside", "no ids", *NO_LISTS])
def test_a_bad_drafter_is_ignored_and_named_once(plain: LLM, guesses: str, caplog: pytest.LogCaptureFixture) -> None:
    class Bad(Drafter):
        source = "bad"

        def draft(self, context: Any, max_tokens: int) -> Any:
            if guesses == "raises":
                raise RuntimeError("no idea")
            if guesses == "no ids":
                return 5
            if guesses in NO_LISTS:
                return Draft(NO_LISTS[guesses])
            return Draft([3] * (max_tokens + 1) if guesses == "too many" else [VOCAB_SIZE])

    llm = drafting([Bad()])
    requests: Work = [([5, 6, 7], SamplingParams(temperature=0.5, seed=1, max_tokens=20))]
    with caplog.at_level(logging.WARNING):
        assert answers(llm, requests) == answers(plain, requests)
    assert "bad" not in llm.engine.draft_counts
    # An array without ids is no draft.
    said = [] if guesses.startswith("an empty") else ["drafter 'bad':"]
    assert [record.getMessage()[:14] for record in caplog.records] == said


@pytest.mark.parametrize("kind", [np.array, set, tuple, deque, torch.tensor])
def test_a_draft_may_be_any_collection_of_ids(plain: LLM, kind: Any) -> None:
    """What could not be sliced made the whole batch fail."""

    class Own(Drafter):
        source = "own"

        def draft(self, context: Any, max_tokens: int) -> Any:
            return Draft(kind([context.token_ids[-1]]))

    llm = drafting([Own()])
    requests: Work = [([5, 6, 7], SamplingParams(temperature=0.5, seed=seed, max_tokens=20)) for seed in range(2)]
    assert answers(llm, requests) == answers(plain, requests)
    assert llm.engine.draft_counts["own"].drafted > 0


def test_what_is_no_drafter_is_refused() -> None:
    for wrong in (Guesser, 5, "tree"):
        with pytest.raises((TypeError, ValueError), match="drafters: expected objects of subclasses of Drafter"):
            drafting([wrong])  # type: ignore[list-item]


class DraftMachine(RuleBasedStateMachine):
    """Requests come, run, and are aborted; whatever is drafted, each gets the tokens that it gets alone."""

    plain: LLM
    llm: LLM
    oracle: Oracle

    @initialize()
    def begin(self) -> None:
        self.llm.reset_prefix_cache()
        self.requests: list[Request] = []
        self.count = 0

    @rule(
        stem=st.integers(1, 12),
        number=st.integers(0, 3),
        kind=st.sampled_from(KINDS),
        length=st.integers(4, 24),
        known=st.booleans(),
    )
    def add(self, stem: int, number: int, kind: dict[str, Any], length: int, known: bool) -> None:
        prompt = [*range(10, 10 + stem), number]
        params = SamplingParams(max_tokens=length, seed=number, **kind)
        self.count += 1
        request = self.llm.engine.request_factory.make(f"r{self.count}", Prompt(prompt), params)
        if known:
            (expected,) = self.plain.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            self.oracle.sequences += [[*prompt, *sample.token_ids] for sample in expected.outputs]
        self.llm.engine.add(request)
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.llm.engine.has_unfinished_requests:
                self.llm.engine.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.llm.engine.abort(data.draw(st.sampled_from(self.requests)).request_id)

    @rule()
    def reset(self) -> None:
        self.llm.reset_prefix_cache()

    @invariant()
    def cache_holds(self) -> None:
        engine = self.llm.engine
        engine.cache.check()
        for group in engine.scheduler.running:
            for sequence in group.sequences:
                assert sequence.table is not None
                if not engine.async_scheduling and sequence.num_pending == 1:
                    most = max(sequence.num_computed, request_prompt(sequence))
                    assert sequence.table.num_blocks <= -(-most // engine.cache.block_size)

    def teardown(self) -> None:
        if not hasattr(self, "requests"):
            return
        while self.llm.engine.has_unfinished_requests:
            self.llm.engine.step()
        for request in self.requests:
            (expected,) = self.plain.generate(
                {"prompt_token_ids": request.prompt_token_ids.tolist()}, request.params, use_tqdm=False
            )
            for sequence, sample in zip(request.sequences, expected.outputs, strict=False):
                got = sequence.output_token_ids
                assert got == sample.token_ids[: len(got)]
                assert sequence.finish_reason in ("abort", sample.finish_reason)
        self.oracle.sequences.clear()


def request_prompt(sequence: Any) -> int:
    return int(sequence.request.num_prompt_tokens)


def test_any_interleaving(plain: LLM) -> None:
    class Machine(DraftMachine):
        oracle = Oracle(3, error_rate=0.15, vocab_size=VOCAB_SIZE)
        llm = drafting([oracle, Guesser(4, VOCAB_SIZE)])

    Machine.plain = plain
    run_state_machine_as_test(Machine, settings=settings(max_examples=8, stateful_step_count=20, deadline=None))


@pytest.mark.slow
def test_what_takes_text_holds_inside_a_draft(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop strings, grammars, bad words, penalties and log-probabilities of the default model: the same, in fewer steps."""
    schema = {
        "type": "object",
        "properties": {"first_name": {"type": "string", "maxLength": 8}, "is_member": {"type": "boolean"}},
        "required": ["first_name", "is_member"],
        "additionalProperties": False,
    }
    prompt = "Here is a person as JSON:"
    common: dict[str, Any] = {"seed": 5, "max_tokens": 24}
    every = [
        SamplingParams(temperature=0.7, stop=["e", " the"], min_tokens=5, **common),
        SamplingParams(temperature=0.0, stop=["is"], include_stop_str_in_output=True, **common),
        SamplingParams(temperature=0.9, structured_outputs=StructuredOutputsParams(json=schema), **common),
        SamplingParams(
            temperature=0.9, structured_outputs=StructuredOutputsParams(json=schema), logprobs=1, n=2, **common
        ),
        SamplingParams(temperature=0.8, repetition_penalty=1.2, bad_words=["name", "John"], logprobs=0, **common),
        SamplingParams(
            temperature=0.5, structured_outputs=StructuredOutputsParams(regex="[a-f]{12}(xyz){3}"), **common
        ),
    ]

    def run() -> list[Any]:
        llm.reset_prefix_cache()
        outputs = llm.generate([prompt] * len(every), every, use_tqdm=False)
        return [
            [(s.text, s.token_ids, s.finish_reason, s.stop_reason, _rounded(s.logprobs)) for s in output.outputs]
            for output in outputs
        ]

    expected = run()
    steps = llm.engine.num_steps
    oracle = Oracle(error_rate=0.1, vocab_size=llm.engine.loaded.vocab_size)
    prompt_ids = llm.get_tokenizer()(prompt).input_ids
    # It goes on behind the ends of answers, and so do its drafts.
    oracle.sequences = [[*prompt_ids, *sample[1], 260, 261] for samples in expected for sample in samples]
    drafts = speculator(llm, [oracle, GrammarDrafter(), PrefixDrafter(llm.engine.cache), SuffixDrafter()])
    monkeypatch.setattr(llm.engine, "_speculator", drafts)
    assert run() == expected
    assert drafts.counts["oracle"].accepted > 20
    assert llm.engine.num_steps - steps < 20
