"""Answers satisfy their grammar, however they are sampled."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from support.replica_servers import tiny_llm

from radixkv import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from radixkv.sampling.grammar import mask as grammar_mask
from radixkv.sampling.grammar.compiler import GrammarCompiler
from radixkv.sampling.grammar.state import GrammarState
from radixkv.sampling.json_schema.prepare import prepare_schema

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["tall", "short"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPT = "A person as JSON, please: "
ARITHMETIC = 'start: sum\nsum: NUMBER (("+" | "-") NUMBER)~1..3\nNUMBER: /[0-9]{1,3}/\n'
MODIFIED = '?start: word\n?word: "a" "b"~2..3\n'
LIMITED = "start[max_tokens=2]: /[0-9]+/\n"
NUMBERED = 'root ::= [\\u00c0-\\u00ff]{2} "\\U0001F600\\\\u0041" [\\u0020-\\u005d] "\\u0022\\u000a"\n'
GBNF = 'root ::= "(" word (", " word)? ")"\nword ::= "red" | "green" | "blue"\n'


def params(**spec: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=120, temperature=0.5, seed=3, n=4, structured_outputs=StructuredOutputsParams(**spec)
    )


def is_person(text: str) -> bool:
    person = json.loads(text)
    return (
        list(person) == ["name", "age", "tags"]
        and 0 <= person["age"] <= 120
        and set(person["tags"]) <= {"tall", "short"}
        and len(person["tags"]) <= 2
    )


@pytest.mark.parametrize(
    ("spec", "holds"),
    [
        ({"json": PERSON}, is_person),
        ({"json": json.dumps(PERSON)}, is_person),
        ({"regex": r"[A-Z]{3}-[0-9]{4}\.?"}, lambda text: re.fullmatch(r"[A-Z]{3}-[0-9]{4}\.?", text)),
        ({"choice": ["yes (of course)", "no", "no."]}, lambda text: text in ("yes (of course)", "no", "no.")),
        ({"grammar": ARITHMETIC}, lambda text: re.fullmatch(r"[0-9]{1,3}([+-][0-9]{1,3}){1,3}", text)),
        # These were taken for GBNF.
        ({"grammar": MODIFIED}, lambda text: text in ("abb", "abbb")),
        ({"grammar": LIMITED}, lambda text: re.fullmatch(r"[0-9]+", text)),
        # The zeros were left out, and what remained could not be read.
        ({"grammar": NUMBERED}, lambda text: re.fullmatch(r"[\u00c0-\u00ff]{2}\U0001F600\\u0041[ -\]]\"\n", text)),
        ({"grammar": GBNF}, lambda text: re.fullmatch(r"\((red|green|blue)(, (red|green|blue))?\)", text)),
    ],
)
def test_every_sample_and_every_beam_satisfies_the_grammar(llm: LLM, spec: dict[str, Any], holds: Any) -> None:
    (output,) = llm.generate(PROMPT, params(**spec), use_tqdm=False)
    assert [sample.finish_reason for sample in output.outputs] == ["stop"] * 4
    assert all(holds(sample.text) for sample in output.outputs)
    search = BeamSearchParams(3, 120, logprobs=4, structured_outputs=StructuredOutputsParams(**spec))
    for beam in llm.beam_search(PROMPT, search)[0].sequences:
        assert beam.text is not None
        text = beam.text.removeprefix(PROMPT).removesuffix("<|im_end|>")
        assert beam.finish_reason == "stop"
        assert holds(text)
        assert all(math.isfinite(entry.logprob) for step in beam.logprobs for entry in step.values())


def test_what_its_last_token_completes_has_stopped_and_is_not_cut_off(llm: LLM) -> None:
    """Beams that ended so used to report that they had reached their length."""
    spec = StructuredOutputsParams(regex="[a-c]{3}")
    sampling = SamplingParams(temperature=0, structured_outputs=spec)
    (sample,) = llm.generate(PROMPT, sampling, use_tqdm=False)[0].outputs
    length = len(sample.token_ids)
    sampling = SamplingParams(temperature=0, max_tokens=length, structured_outputs=spec)
    (sample,) = llm.generate(PROMPT, sampling, use_tqdm=False)[0].outputs
    assert sample.finish_reason == "stop"
    (beam,) = llm.beam_search(PROMPT, BeamSearchParams(1, length, structured_outputs=spec))[0].sequences
    assert beam.text == PROMPT + sample.text
    assert beam.finish_reason == "stop"


def test_what_is_likely_next_is_forced_text_and_what_followed_the_same_token_before(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer('{"name": "Ann", "age": 31, "tags": []}', add_special_tokens=False).input_ids
    followers = {before: [999, after] for before, after in itertools.pairwise(ids)}
    state = llm.engine.grammars.compile(StructuredOutputsParams(json=PERSON))
    alone, with_followers = "", ""
    for token_id in ids[:-1]:
        state.advance(token_id)
        forced, likely = (state.likely_tokens(token_id, known, 8) for known in ({}, followers))
        assert len(likely) <= 8
        assert state.num_before_end(likely) >= len(likely) - 1  # the last may complete the answer
        assert state.likely_tokens(token_id, followers, 8) == likely  # it changes nothing
        alone += f"{tokenizer.decode(forced)}\n"
        with_followers += f"{tokenizer.decode(likely)}\n"
    assert "name" in alone
    assert ', "tags": [' not in alone
    assert ', "tags": [' in with_followers


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"json": {"const": "<|im_end|>"}}, '"<|im_end|>"'),
        ({"choice": ["say <|im_end|> now"]}, "say <|im_end|> now"),
        ({"regex": r"<\|endoftext\|>"}, "<|endoftext|>"),
    ],
)
def test_the_name_of_a_special_token_is_spelled(llm: LLM, spec: dict[str, Any], text: str) -> None:
    (output,) = llm.generate(PROMPT, params(**spec), use_tqdm=False)
    for sample in output.outputs:
        assert sample.text == text
        assert min(sample.token_ids) > max(llm.get_tokenizer().all_special_ids)


def test_json_has_at_most_one_space_between_its_elements(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, params(json={"const": {"a": [1, 2]}}), use_tqdm=False)
    for sample in output.outputs:
        assert re.fullmatch(r' ?\{ ?"a" ?: ?\[ ?1 ?, ?2 ?\] ?\} ?', sample.text)


def test_any_json_object(llm: LLM) -> None:
    spec = StructuredOutputsParams(json_object=True)
    sampling = SamplingParams(max_tokens=40, temperature=0, structured_outputs=spec)
    (sample,) = llm.generate(PROMPT, sampling, use_tqdm=False)[0].outputs
    assert sample.text.startswith("{")
    if sample.finish_reason == "stop":
        assert isinstance(json.loads(sample.text), dict)


def test_keywords_that_constrain_nothing_are_accepted(llm: LLM) -> None:
    secret = {"type": "string", "format": "password", "enum": ["abc"], "title": "x", "examples": ["y"]}
    schema = {"type": "array", "items": secret, "minItems": 1, "maxItems": 1, "uniqueItems": False}
    sampling = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(json=schema))
    assert json.loads(llm.generate(PROMPT, sampling, use_tqdm=False)[0].outputs[0].text) == ["abc"]
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": False}
    sampling = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(json=record))
    assert json.loads(llm.generate(PROMPT, sampling, use_tqdm=False)[0].outputs[0].text) == {}


def test_alternatives_may_each_require_what_is_described_once() -> None:
    names = [f"name{number}" for number in range(300)]
    branches = [{"required": names[20 * i : 20 * i + 80]} for i in range(10)]
    schema = {"type": "object", "properties": {name: {} for name in names}, "anyOf": branches}
    prepare_schema(schema)  # 300 properties, and 800 times a name of one
    with pytest.raises(ValueError, match="at most 1000 properties"):
        prepare_schema(
            {**schema, "anyOf": [{"required": [f"{i}.{number}" for number in range(80)]} for i in range(10)]}
        )


def test_a_structural_tag_leaves_text_free_until_a_trigger(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    structures = [{"begin": "<city>", "schema": {"enum": ["Rome", "Oslo"]}, "end": "</city>"}]
    tag = {"triggers": ["<city"], "structures": structures}
    for spec in (tag, json.dumps(tag)):
        state = llm.engine.grammars.compile(StructuredOutputsParams(structural_tag=spec))
        for token_id in tokenizer("Hello <city", add_special_tokens=False)["input_ids"]:
            assert not torch.isneginf(masked(llm, state))[token_id]
            state.advance(token_id)
        allowed = torch.isfinite(masked(llm, state)).nonzero().squeeze(1).tolist()
        assert {tokenizer.decode([token_id])[0] for token_id in allowed} == {">"}
        for token_id in tokenizer('>"Rome"</city> and so on', add_special_tokens=False)["input_ids"]:
            assert not torch.isneginf(masked(llm, state))[token_id]
            state.advance(token_id)
        assert state.failure is None


def masked(llm: LLM, state: GrammarState) -> torch.Tensor:
    logits = torch.zeros(1, llm.engine.loaded.vocab_size)
    grammar_mask.apply_grammar_bitmask(logits, {0: state})
    return logits[0]


@pytest.mark.parametrize("vocab_size", [60, 64, 100])
def test_a_mask_that_a_gpu_unpacks_is_what_a_cpu_unpacks(vocab_size: int) -> None:
    bitmask = np.random.default_rng(vocab_size).integers(0, 256, (3, 8), dtype=np.uint8)
    expected = np.unpackbits(bitmask, axis=1, count=vocab_size, bitorder="little") == 0
    assert np.array_equal(grammar_mask.disallowed_tokens(torch.from_numpy(bitmask), vocab_size).numpy(), expected)


@pytest.mark.parametrize("num_logits", [49_152, 49_280])
def test_tokenizers_and_models_may_each_have_more_tokens_than_the_other(llm: LLM, num_logits: int) -> None:
    """As with Gemma 3 1B, whose tokenizer has one for images; or as with models whose logits are padded."""
    tokenizer = copy.deepcopy(llm.get_tokenizer())
    tokenizer.add_tokens(["<|image|>"], special_tokens=True)
    assert len(tokenizer) == 49_153
    loaded = dataclasses.replace(llm.engine.loaded, tokenizer=tokenizer, vocab_size=num_logits)
    state = GrammarCompiler(loaded).compile(StructuredOutputsParams(regex="ab+"))
    logits = torch.zeros(1, num_logits)
    grammar_mask.apply_grammar_bitmask(logits, {0: state})
    allowed = (~torch.isneginf(logits[0])).nonzero()[:, 0].tolist()
    assert sorted(tokenizer.convert_ids_to_tokens(allowed)) == ["a", "ab"]


def is_digits(text: str) -> bool:
    return re.fullmatch("[0-9]{6}", text) is not None


def test_slow_masks_are_filled_side_by_side_and_are_the_same(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    for spec in (StructuredOutputsParams(regex="[a-f]{9}"), StructuredOutputsParams(json_object=True)):
        states += [llm.engine.grammars.compile(spec) for _ in range(4)]
    logits = torch.zeros(8, llm.engine.loaded.vocab_size)
    grammar_mask.apply_grammar_bitmask(logits, dict(enumerate(states)))
    monkeypatch.setattr(grammar_mask, "_MAX_SERIAL_SECONDS", -1.0)
    side_by_side = torch.zeros_like(logits)
    grammar_mask.apply_grammar_bitmask(side_by_side, dict(enumerate(states)))
    assert torch.equal(logits, side_by_side)
    assert 0 < int(torch.isneginf(logits).sum()) < logits.numel()


def test_a_grammar_combines_with_other_sampling_options(llm: LLM) -> None:
    spec = StructuredOutputsParams(choice=["red", "green"])
    (red,) = llm.get_tokenizer()("red")["input_ids"]
    options = SamplingParams(
        temperature=0, max_tokens=50, min_tokens=20, ignore_eos=True, logprobs=3, logit_bias={red: 100},
        repetition_penalty=1.3, structured_outputs=spec,
    )  # fmt: skip
    (sample,) = llm.generate("The colour of tomatoes is:", options, use_tqdm=False)[0].outputs
    assert (sample.text, sample.finish_reason) == ("red", "stop")
    assert sample.logprobs is not None
    # The model's own, from before the grammar bitmask was applied.
    assert len(sample.logprobs[0]) >= 3


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("options", [{}, {"ignore_eos": True}, {"ignore_eos": True, "min_tokens": 4}])
def test_the_token_that_ends_a_grammar_s_answer_is_no_part_of_it(
    llm: LLM, options: dict[str, Any], include: bool
) -> None:
    """With ``ignore_eos``, the text ended with the token's name, and nothing kept it from coming before ``min_tokens``."""
    end = llm.get_tokenizer().eos_token_id
    params = SamplingParams(
        seed=1, max_tokens=50, logit_bias={end: 100}, skip_special_tokens=False, include_stop_str_in_output=include,
        structured_outputs=StructuredOutputsParams(regex="[a-z]{3,50}"), **options,
    )  # fmt: skip
    (sample,) = llm.generate("A word is", params, use_tqdm=False)[0].outputs
    assert re.fullmatch(f"[a-z]{{3,50}}{re.escape('<|im_end|>') if include else ''}", sample.text)
    assert (sample.finish_reason, sample.stop_reason, sample.token_ids[-1]) == ("stop", None, end)
    assert len(sample.token_ids) > options.get("min_tokens", 0)


def test_requests_without_a_grammar_in_the_same_batch_are_unchanged(llm: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=12)
    (expected,) = llm.generate("One, two, three,", free, use_tqdm=False)[0].outputs
    outputs = llm.generate(["One, two, three,", PROMPT], [free, params(json=PERSON)], use_tqdm=False)
    assert outputs[0].outputs[0].text == expected.text
    assert all(is_person(sample.text) for sample in outputs[1].outputs)


def test_preemption_keeps_the_grammar(default_tokenizer: Any) -> None:
    llm = tiny_llm(default_tokenizer, num_blocks=24, block_size=4)
    spec = StructuredOutputsParams(json=PERSON)
    sampling = [SamplingParams(max_tokens=60, temperature=1.0, seed=seed, structured_outputs=spec) for seed in range(6)]
    outputs = llm.generate([f"{number} {PROMPT}" for number in range(6)], sampling, use_tqdm=False)
    assert llm.engine.scheduler.num_preemptions
    for output in outputs:
        (sample,) = output.outputs
        assert sample.finish_reason == "length" or is_person(sample.text)
    llm.engine.cache.check()


def test_a_draft_goes_as_far_as_tokens_are_allowed_and_another_follows(llm: LLM) -> None:
    """One that completed the answer had a row computed behind it, of which no token could be drawn."""
    state = llm.engine.grammars.compile(StructuredOutputsParams(regex="[ab]{3}"))
    a, b, c = llm.get_tokenizer().convert_tokens_to_ids(["a", "b", "c"])
    drafts = [[], [a], [a, b], [a, b, a], [a, b, a, b], [a, c, a], [c]]
    assert [state.num_before_end(draft) for draft in drafts] == [0, 1, 2, 2, 2, 1, 0]
