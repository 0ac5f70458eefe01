"""The drafts that are forced in order to measure their cost come in every step, however often they are wrong."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.model_zoo import build_supported

from radixkv import LLM, SamplingParams
from radixkv.bench.gpu.decode_drafts import DRAFTS, OPTIONS, _measure, force_drafts
from radixkv.drafting import DraftContext
from radixkv.engine.speculation import Speculator
from radixkv.prompts import Prompt

NUM_SEQUENCES, NUM_STEPS = 6, 20


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> LLM:
    """More sequences than are always asked about when drafts are mostly wrong; these drafts are never right."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    llm = LLM(
        build_supported("llama"), num_blocks=600, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, **OPTIONS
    )
    force_drafts(llm, 0.0)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=200, ignore_eos=True)
    for number in range(NUM_SEQUENCES):
        llm.engine.add(llm.engine.request_factory.make(str(number), Prompt([5 + number]), params))
    llm.engine.step()
    return llm


def test_every_step_has_all_of_them(decoding: LLM) -> None:
    assert _measure(decoding, NUM_STEPS).drafts == DRAFTS


def test_a_row_some_of_whose_steps_had_none_fails(decoding: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    speculator = decoding.engine._speculator
    assert speculator is not None
    monkeypatch.setattr(speculator, "learn", partial(Speculator.learn, speculator))  # so that what is wrong is counted
    with pytest.raises(RuntimeError, match=rf"\d+ of {NUM_STEPS} steps were without drafts"):
        _measure(decoding, NUM_STEPS)


def test_a_context_has_no_other_fields() -> None:
    with pytest.raises(AttributeError, match="num_idle"):
        DraftContext([1], 1).num_idle = 0  # type: ignore[attr-defined]
