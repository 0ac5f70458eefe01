"""Where an answer ends, and with which text: every way to end one beside every other, on made-up tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_templates import make_tokenizer, text_interface

from radixkv import SamplingParams, StructuredOutputsParams
from radixkv.engine.sampled_token import append_token, prepare_sampling
from radixkv.sampling.grammar.compiler import GrammarCompiler
from radixkv.scheduling.request import Request, TokenSequence

TOKENIZER = make_tokenizer("")
A, B, C = TOKENIZER.convert_tokens_to_ids(["a", "b", "c"])
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
TEXTS = {A: "a", B: "b", C: "c", END: ""}


def begun(params: SamplingParams, max_new_tokens: int = 9, tokenizer: Any = TOKENIZER, seed: int = 5) -> TokenSequence:
    """A sequence without an answer yet."""
    end_token_ids = frozenset() if params.ignore_eos else frozenset({END})
    request = Request("one", None, np.array([A, B], np.int32), params, seed, max_new_tokens, end_token_ids)
    sequence = TokenSequence(request, 0, [A, B])
    prepare_sampling(sequence, tokenizer)
    return sequence


@settings(max_examples=300)
@given(
    drawn=st.lists(st.sampled_from([A, A, B, B, C, END]), min_size=9, max_size=9),
    max_new_tokens=st.integers(1, 9),
    params=st.builds(
        SamplingParams,
        min_tokens=st.sampled_from([0, 0, 2, 4]),
        max_tokens=st.just(9),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([[], [C], [B, END]]),
        stop=st.sampled_from([[], ["ab"], ["b", "ab"], ["bc", "aa"]]),
        include_stop_str_in_output=st.booleans(),
    ),
)
def test_an_answer_ends_with_the_first_token_that_ends_it(
    drawn: list[int], max_new_tokens: int, params: SamplingParams
) -> None:
    sequence = begun(params, max_new_tokens)
    text = ""
    for num_new, token_id in enumerate(drawn, start=1):
        append_token(sequence, token_id)
        may_stop = num_new >= params.min_tokens
        ended_by: tuple[str | None, str | int | None] = (None, None)
        if may_stop and token_id == END and not params.ignore_eos:
            ended_by = "stop", None
        elif may_stop and token_id in params.end_token_ids:
            ended_by = "stop", token_id
        is_shown = ended_by == (None, None) or params.include_stop_str_in_output
        text += TEXTS[token_id] if is_shown else ""
        found = [stop for stop in params.stop_strings if may_stop and TEXTS[token_id] and text.endswith(stop)]
        if ended_by == (None, None) and found:
            ended_by = "stop", min(found)
            text = text if params.include_stop_str_in_output else text.removesuffix(min(found))
        elif ended_by == (None, None) and num_new == max_new_tokens:
            ended_by = "length", None
        assert (sequence.finish_reason, sequence.stop_reason) == ended_by
        if sequence.finish_reason is not None:
            break
    assert sequence.output_token_ids == drawn[:num_new]
    assert sequence.sampling is not None
    assert sequence.sampling.output_token_ids == drawn[:num_new]
    assert sequence.detokenizer is not None
    assert sequence.detokenizer.text == sequence.detokenizer.delta() == text


@pytest.mark.parametrize("seed", [0, 7])
def test_samples_are_drawn_with_their_request_s_seed_and_their_own_index(seed: int) -> None:
    sequence = begun(SamplingParams(), seed=seed)
    assert sequence.sampling is not None
    row = sequence.sampling.row()
    assert (row.seed, row.sample_index, row.token_index) == (seed, 0, 0)
    sequence.index = 3
    prepare_sampling(sequence, TOKENIZER)
    assert sequence.sampling.row().sample_index == 3


def test_each_sample_ends_where_its_own_answer_satisfies_the_grammar() -> None:
    sequence = begun(SamplingParams())
    request = sequence.request
    request.grammar = GrammarCompiler(text_interface("")).compile(StructuredOutputsParams(choice=["ab", "aba"]))
    samples = [TokenSequence(request, index, [A, B]) for index in range(2)]
    for sample in samples:
        prepare_sampling(sample, TOKENIZER)
        assert sample.sampling is not None
        assert sample.sampling.needs_host
    finish_reasons = []
    for sample, token_ids in zip(samples, ([A, B, A], [A, B, END]), strict=True):
        for token_id in token_ids:
            assert sample.finish_reason is None
            append_token(sample, token_id)
        finish_reasons.append(sample.finish_reason)
    assert finish_reasons == ["stop", "stop"]


def test_where_no_text_is_wanted_or_can_be_none_is_decoded() -> None:
    assert begun(SamplingParams(detokenize=False)).detokenizer is None
    assert begun(SamplingParams(), tokenizer=None).detokenizer is None
