"""Drafts change how many tokens a step yields, and no token; rejected drafts leave no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from support.chat_templates import make_tokenizer
from support.drafters import Guesser, Oracle, draft_from, speculator, speculator_of, use_ticks
from support.drafting_engines import SMALL, Work, answers, drafting, plain_llm, rounded, work
from support.model_zoo import VOCAB_SIZE, build, build_supported
from support.tiny_engine import add

from radixkv import LLM, SamplingParams, StructuredOutputsParams
from radixkv.cache import EventLog
from radixkv.cache.event_recorder import EventRecorder
from radixkv.drafting.followers import NamespaceFollowers
from radixkv.drafting.sources import GrammarDrafter, PrefixDrafter, SuffixDrafter
from radixkv.sampling.grammar.budget import GrammarBudget
from radixkv.scheduling.batch import Batch
from radixkv.scheduling.request import Request


@pytest.fixture(scope="module")
def plain() -> LLM:
    return plain_llm()


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
    oracle.learn(requests, expected)
    assert answers(llm, requests) == expected


def test_drafts_were_accepted_and_rejected(drafter: tuple[LLM, Oracle], plain: LLM) -> None:
    """The property above is not vacuous: drafts of all kinds went through the model, and saved steps."""
    llm, oracle = drafter
    requests: Work = [([5, 6, 7, 8], SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True))]
    oracle.learn(requests, answers(plain, requests))
    before, steps = num_drafts(llm), llm.engine.num_steps
    assert answers(llm, requests)[0][0][0] == oracle.sequences[0][4:]
    drafted, accepted = num_drafts(llm)
    assert 0 < accepted - before[1] < drafted - before[0]
    assert llm.engine.num_steps - steps < 40


def test_the_size_of_a_batch_includes_its_drafts(
    drafter: tuple[LLM, Oracle], plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was noted before there were drafts in it."""
    llm, oracle = drafter
    prompt = [5, 6, 7, 8]
    requests: Work = [(prompt, SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True))]
    oracle.learn(requests, answers(plain, requests))
    step = llm.engine.step
    sizes: dict[int, int] = {}

    def noting() -> list[Request]:
        touched = step()
        sizes[llm.engine.num_steps] = llm.engine.last_batch.num_tokens
        return touched

    monkeypatch.setattr(llm.engine, "step", noting)
    before, _ = num_drafts(llm)
    answers(llm, requests)
    num_drafted = num_drafts(llm)[0] - before
    assert num_drafted > 0
    assert sum(sizes.values()) == len(prompt) + (len(sizes) - 1) + num_drafted


@pytest.mark.parametrize(
    "options",
    [{"stop": ["d"]}, {"structured_outputs": StructuredOutputsParams(regex="[a-d]{9}")}, {"max_tokens": 9}],
    ids=["stop string", "grammar", "length"],
)
def test_a_right_draft_that_ends_an_answer_is_accepted(options: dict[str, Any]) -> None:
    """It counted as rejected, since no token was drawn behind it."""
    tokenizer, oracle = make_tokenizer(""), Oracle()
    llm = LLM(
        build("llama", {"vocab_size": len(tokenizer)}),
        tokenizer=tokenizer,
        num_blocks=40,
        speculative_config={"method": "tree", "num_speculative_tokens": 6, "drafters": [oracle]},
    )
    use_ticks(llm)
    allowed = dict.fromkeys(tokenizer.convert_tokens_to_ids(list("abcd")), 100.0)
    params = SamplingParams(**{"seed": 1, "max_tokens": 100, "logit_bias": allowed, **options})
    prompt = {"prompt_token_ids": [5, 6, 7, 8]}
    (plain,) = llm.generate(prompt, params, use_tqdm=False)
    oracle.sequences = [[*prompt["prompt_token_ids"], *plain.outputs[0].token_ids]]
    llm.reset_prefix_cache()
    num_steps = llm.engine.num_steps
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    counts = output.metrics.drafts["oracle"]
    assert counts.accepted == counts.drafted > 0
    if "structured_outputs" in options:  # no row is behind the last token
        assert counts.drafted == len(output.outputs[0].token_ids) - (llm.engine.num_steps - num_steps)


def test_log_probabilities_of_prompts_are_those_without_drafts(drafter: tuple[LLM, Oracle], plain: LLM) -> None:
    """The rows of a prompt's last chunk belong to the prompt, and never to a draft."""
    llm, oracle = drafter
    for length in (3, 8, 30):
        prompt = list(range(5, 5 + length))
        params = SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=2, logprobs=1, ignore_eos=True)
        requests: Work = [(prompt, params)] * 2
        expected = answers(plain, requests)
        oracle.learn(requests, expected)
        assert answers(llm, requests) == expected


def test_tokens_are_those_without_drafts_in_fp8() -> None:
    """Rejected tokens were written with the same scales, and are overwritten."""
    oracle = Oracle(error_rate=0.3, vocab_size=VOCAB_SIZE)
    fp8 = LLM(build_supported("llama"), kv_cache_dtype="fp8", **SMALL)
    llm = drafting([oracle], kv_cache_dtype="fp8")
    requests: Work = [
        ([5, 6, 7, 8, number], SamplingParams(temperature=t, seed=number, max_tokens=30, ignore_eos=True))
        for number, t in enumerate((0.0, 0.8, 1.0))
    ]
    expected = [answers(fp8, [request])[0] for request in requests]
    oracle.learn(requests, expected)
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
    oracle.learn(requests, expected)
    sizes: list[int] = []
    drafts = speculator_of(llm)
    draft = drafts.draft

    def noting(batch: Batch) -> None:
        draft(batch)
        sizes.append(sum(chunk.num_tokens for chunk in batch.chunks) + sum(map(len, batch.drafts.values())))

    drafts.draft = noting  # type: ignore[method-assign]
    assert answers(llm, requests) == expected
    assert 20 <= max(sizes) <= SMALL["max_num_batched_tokens"]


def test_steps_of_prompts_alone_do_not_keep_others_from_being_launched_ahead() -> None:
    """After some of them, each used to wait for the one before, though nothing is drafted behind a prompt."""
    drafts = speculator_of(drafting([Oracle()]))
    assert not any(drafts.wants_tokens(Batch([])) for _ in range(100))


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
    oracle.learn(requests, expected)
    assert answers(llm, requests) == expected
    assert num_drafts(llm)[1] > 20


@pytest.mark.parametrize("ahead", [False, True], ids=["in order", "launched ahead"])
def test_what_a_step_takes_is_learned_from_steps_without_drafts_too(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When steps were launched ahead, only those with drafts used to be observed, so what drafts add was unknown."""
    llm = drafting(async_scheduling=ahead)
    draft_from(llm)
    learned: list[tuple[int, float]] = []
    monkeypatch.setattr(
        speculator_of(llm)._times, "observe", lambda rows, seconds, drafting: learned.append((rows, seconds))
    )
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [7, 8, number]} for number in range(3)], params, use_tqdm=False)
    decoding = [seconds for rows, seconds in learned if rows == 3]
    assert 30 <= len(decoding) <= 39
    assert min(decoding) > 0


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
            request = add(engine, f"r{number}", [7, 7, number, 9], params)
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
    """By this, a GPU tells long drafts from prompts."""
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
    recorder = EventRecorder(events)
    cache._tree.observers.on_insert += (recorder.on_insert,)
    cache._tree.observers.on_remove += (recorder.on_remove,)


@pytest.mark.slow
def test_what_takes_text_holds_inside_a_draft(default_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
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
        default_llm.reset_prefix_cache()
        outputs = default_llm.generate([prompt] * len(every), every, use_tqdm=False)
        return [
            [(s.text, s.token_ids, s.finish_reason, s.stop_reason, rounded(s.logprobs)) for s in output.outputs]
            for output in outputs
        ]

    expected = run()
    steps = default_llm.engine.num_steps
    oracle = Oracle(error_rate=0.1, vocab_size=default_llm.engine.loaded.vocab_size)
    prompt_ids = default_llm.get_tokenizer()(prompt).input_ids
    # It goes on behind the ends of answers, and so do its drafts.
    oracle.sequences = [[*prompt_ids, *sample[1], 260, 261] for samples in expected for sample in samples]
    drafts = speculator(
        default_llm,
        [oracle, GrammarDrafter(NamespaceFollowers()), PrefixDrafter(default_llm.engine.cache), SuffixDrafter()],
    )
    monkeypatch.setattr(default_llm.engine, "_speculator", drafts)
    assert run() == expected
    assert drafts.counts["oracle"].accepted > 20
    assert default_llm.engine.num_steps - steps < 20


def test_a_grammar_that_owes_processor_time_gets_no_drafts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks for drafts used to be charged to it, which failed requests that would have ended well without drafts."""
    schema = {
        "type": "object",
        "properties": {"first_name": {"type": "string", "maxLength": 4}},
        "required": ["first_name"],
    }
    params = SamplingParams(temperature=0.0, max_tokens=16, structured_outputs=StructuredOutputsParams(json=schema))
    drafts = speculator(llm, [GrammarDrafter(NamespaceFollowers())])
    monkeypatch.setattr(llm.engine, "_speculator", drafts)

    def answer() -> list[int]:
        return llm.generate("A person as JSON:", params, use_tqdm=False)[0].outputs[0].token_ids

    expected = answer()
    drafted = drafts.counts["grammar"].drafted
    assert drafted > 0
    monkeypatch.setattr(GrammarBudget, "in_debt", True)
    assert answer() == expected
    assert drafts.counts["grammar"].drafted == drafted
