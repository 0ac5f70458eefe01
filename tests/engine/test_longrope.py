"""Models with longrope choose their factors once, by the length that sequences may have, and not by what is in a batch."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_zoo import LONGROPE, ORIGINAL_LENGTH, VOCAB_SIZE, build, build_longrope
from support.prompt_sets import tokens_of_transformers

from radixkv import LLM, AsyncLLM, SamplingParams
from radixkv.cluster.describe import describe
from radixkv.cluster.description import ReplicaDescription
from radixkv.engine.block_fingerprint import block_fingerprint
from radixkv.errors import UnsupportedModelError
from radixkv.model.positions.longrope import choose_factors

NUM_NEW = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
OPTIONS: dict[str, Any] = {"block_size": 4, "num_blocks": 120, "max_num_batched_tokens": 16}
# The last token is never computed.
LONGEST_SHORT = ORIGINAL_LENGTH + 1
LONG_LENGTHS = (ORIGINAL_LENGTH + 1, ORIGINAL_LENGTH + 9)
SHORT_LENGTHS = (3, ORIGINAL_LENGTH - NUM_NEW)


def prompt(length: int) -> list[int]:
    return [(7 * index + length) % (VOCAB_SIZE - 3) + 3 for index in range(length)]


@cache
def expected(name: str, lengths: tuple[int, ...]) -> list[list[int]]:
    """What transformers generates for each prompt alone."""
    return tokens_of_transformers(build_longrope(name), [prompt(length) for length in lengths], NUM_NEW)


def answers(llm: LLM, lengths: tuple[int, ...]) -> list[list[int]]:
    inputs = [{"prompt_token_ids": prompt(length)} for length in lengths]
    outputs = llm.generate(inputs, GREEDY, use_tqdm=False)
    llm.engine.cache.check()
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", sorted(LONGROPE))
def test_sequences_up_to_the_original_length_are_answered_as_transformers_does(name: str) -> None:
    for length in (ORIGINAL_LENGTH, LONGEST_SHORT):
        llm = LLM(build_longrope(name), max_model_len=length, **OPTIONS)
        assert llm.engine.loaded.rope_factors == "short"
        for _ in range(2):  # the second time everything is cached
            assert answers(llm, SHORT_LENGTHS) == expected(name, SHORT_LENGTHS)


@pytest.mark.parametrize("name", sorted(LONGROPE))
def test_where_sequences_may_be_longer_those_that_are_are_answered_as_transformers_does(name: str) -> None:
    llm = LLM(build_longrope(name), max_model_len=2 * ORIGINAL_LENGTH, **OPTIONS)
    assert llm.engine.loaded.rope_factors == "long"
    for _ in range(2):
        assert answers(llm, LONG_LENGTHS) == expected(name, LONG_LENGTHS)


@pytest.mark.parametrize("name", sorted(LONGROPE))
def test_answers_do_not_depend_on_the_lengths_in_a_batch(name: str) -> None:
    alone: list[list[int]] = []
    for length in SHORT_LENGTHS + LONG_LENGTHS:
        alone += answers(LLM(build_longrope(name), **OPTIONS), (length,))
    llm = LLM(build_longrope(name), **OPTIONS)
    for _ in range(2):
        assert answers(llm, SHORT_LENGTHS + LONG_LENGTHS) == alone
    # A prefix that was cached by a short prompt serves a long one.
    llm = LLM(build_longrope(name), **OPTIONS)
    long = prompt(LONG_LENGTHS[0])
    llm.generate({"prompt_token_ids": long[:12]}, GREEDY, use_tqdm=False)
    (output,) = llm.generate({"prompt_token_ids": long}, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens >= 12
    assert list(output.outputs[0].token_ids) == alone[2]


def test_the_two_choices_give_different_keys() -> None:
    """Otherwise the tests above would show nothing."""
    for name in LONGROPE:
        short = LLM(build_longrope(name), max_model_len=LONGEST_SHORT, **OPTIONS)
        long = LLM(build_longrope(name), max_model_len=LONGEST_SHORT + 1, **OPTIONS)
        logprobs = []
        for llm in (short, long):
            params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
            (output,) = llm.generate({"prompt_token_ids": prompt(16)}, params, use_tqdm=False)
            assert output.prompt_logprobs is not None
            logprobs.append([part.logprob for step in output.prompt_logprobs[1:] if step for part in step.values()])
        assert max(abs(a - b) for a, b in zip(*logprobs, strict=True)) > 1e-3, name


def test_by_default_a_model_is_as_long_as_it_can_be_and_as_the_pool_has_room_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "radixkv")
    roomy = LLM(build_longrope("phi3"), **OPTIONS)
    assert roomy.engine.loaded.rope_factors == "long"
    message = (
        "are by the long factors for all sequences, because one may have 481 tokens; with a max_model_len of up to 33 "
    )
    assert [message in record.message for record in caplog.records if record.levelname == "WARNING"] == [True]
    caplog.clear()
    scarce = LLM(build_longrope("phi3"), **{**OPTIONS, "num_blocks": ORIGINAL_LENGTH // 4})
    assert scarce.engine.loaded.rope_factors == "short"
    message = "are by the short factors for all sequences, because one may have 33 tokens; "
    assert [message in record.message for record in caplog.records if "factors" in record.message] == [True]
    assert answers(scarce, SHORT_LENGTHS[:1]) == expected("phi3", SHORT_LENGTHS[:1])
    assert LLM(build("phi3", {}), **OPTIONS).engine.loaded.rope_factors is None


def test_a_model_is_chosen_for_anew_by_each_llm_that_it_is_given_to(tmp_path: Path) -> None:
    model = build_longrope("phi3")
    names = []
    for length in (2 * ORIGINAL_LENGTH, ORIGINAL_LENGTH, 2 * ORIGINAL_LENGTH):
        lengths = LONG_LENGTHS if length > ORIGINAL_LENGTH else SHORT_LENGTHS
        with LLM(model, max_model_len=length, disk_cache=tmp_path, **OPTIONS) as llm:
            assert answers(llm, lengths) == expected("phi3", lengths)
            names.append((llm.engine.loaded.fingerprint, block_fingerprint(llm.engine.loaded, llm.engine.pool)))
    assert names[0] == names[2]
    assert names[0][0] == names[1][0]  # it is the same model
    assert names[0][1] != names[1][1]  # whose blocks differ


@pytest.mark.usefixtures("loads_are_worth_it")
def test_blocks_on_disk_of_one_choice_are_not_read_by_the_other(tmp_path: Path) -> None:
    for length, num_cached in ((LONGEST_SHORT, 0), (LONGEST_SHORT + 1, 0), (LONGEST_SHORT, 15)):
        with LLM(build_longrope("phi3"), max_model_len=length, disk_cache=tmp_path, **OPTIONS) as llm:
            (output,) = llm.generate({"prompt_token_ids": prompt(16)}, GREEDY, use_tqdm=False)
            assert (output.num_cached_tokens or 0) // 4 == num_cached // 4


async def test_replicas_that_chose_otherwise_are_of_another_generation() -> None:
    async def described(num_blocks: int) -> ReplicaDescription:
        options = {**OPTIONS, "num_blocks": num_blocks}
        async with AsyncLLM(LLM(build_longrope("phi3"), **options)) as engine:
            return await describe(engine, "one", 0.0)

    small, larger, large = [await described(num_blocks) for num_blocks in (8, 9, 120)]
    assert small.difference(large) == "rope_factors: 'short', and 'long' there"
    assert larger.generation == large.generation


def test_types_of_layers_may_differ_in_their_original_length() -> None:
    longer = {
        **LONGROPE["gemma3n_text"]["rope_parameters"]["sliding_attention"],
        "original_max_position_embeddings": 64,
    }
    parameters = {**LONGROPE["gemma3n_text"]["rope_parameters"], "sliding_attention": longer}
    model = build("gemma3n_text", {**LONGROPE["gemma3n_text"], "rope_parameters": parameters})
    chosen = [choose_factors(model, length) for length in (33, 34, 65, 66)]
    assert chosen == ["short", *2 * ["full_attention: long, sliding_attention: short"], "long"]


def test_no_call_of_a_model_changes_what_was_chosen() -> None:
    model = build_longrope("phi3")
    choose_factors(model, LONGEST_SHORT)
    at_first = torch.tensor([[5]]), torch.tensor([[5]])
    beyond = torch.tensor([[5]]), torch.tensor([[ORIGINAL_LENGTH + 1]])
    rotary = model.get_submodule("model.rotary_emb")
    x = torch.zeros(1, 1, 32)
    before = rotary(x, at_first[1])[0]
    with torch.inference_mode():
        model(input_ids=beyond[0], position_ids=beyond[1], use_cache=False)
        together = rotary(x, torch.tensor([[5, 100]]))[0]
    torch.testing.assert_close(together[:, :1], before, rtol=0, atol=0)


def test_longrope_of_another_make_is_refused() -> None:
    model = build("llama", {})
    model.config.rope_parameters = LONGROPE["llama"]["rope_parameters"]
    with pytest.raises(
        UnsupportedModelError, match="its rotary positions of type 'longrope' depend on the longest sequence"
    ):
        LLM(model, **OPTIONS)
