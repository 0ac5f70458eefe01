"""Log-probabilities of prompts take no more rows of logits per step than there is memory for, and none is left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.model_zoo import build_shallow

from radixkv import LLM, SamplingParams
from radixkv.scheduling.batch import ScheduledChunk
from radixkv.scheduling.logit_rows import bound_logit_rows


def chunk(num_tokens: int, lacks_logprobs: bool) -> ScheduledChunk:
    group: Any = SimpleNamespace(request=SimpleNamespace(lacks_prompt_logprobs=lacks_logprobs))
    return ScheduledChunk(group, SimpleNamespace(), num_tokens, True)  # type: ignore[arg-type]


def test_what_takes_more_rows_is_left_to_later_steps_and_the_rest_as_it_is() -> None:
    chunks = [chunk(50, False), chunk(30, True), chunk(40, True), chunk(20, True), chunk(60, False)]
    bounded = bound_logit_rows(chunks, 64)
    assert [(each.num_tokens, each.completes) for each in bounded] == [(50, True), (30, True), (34, False), (60, True)]
    assert bound_logit_rows(chunks, 1000) == chunks


def test_log_probabilities_are_those_of_long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: Any = [{"prompt_token_ids": [3 + (7 * i + own) % 150 for i in range(40 + own)]} for own in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    model = build_shallow("llama")
    llm = LLM(model, num_blocks=80, block_size=4)
    expected = llm.generate(prompts, params, use_tqdm=False)
    monkeypatch.setattr(llm.engine.scheduler, "_max_prompt_logit_rows", 16)
    llm.reset_prefix_cache()
    before = llm.engine.num_steps
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.engine.num_steps - before >= (40 + 41 + 42) / 16
    for output, truth in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == truth.outputs[0].token_ids
        assert output.prompt_logprobs is not None
        assert truth.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids or ())
        for own, other in zip(output.prompt_logprobs[1:], truth.prompt_logprobs[1:], strict=True):
            assert own is not None
            assert other is not None
            assert {token: each.logprob for token, each in own.items()} == pytest.approx(
                {token: each.logprob for token, each in other.items()}, abs=1e-4
            )
