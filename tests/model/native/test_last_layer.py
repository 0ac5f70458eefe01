"""The last decoder layer computes only the rows whose logits are wanted, and no answer shows it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.cpu_variants import each_variant, use
from support.model_zoo import SUPPORTED, VOCAB_SIZE, WIDE, build
from torch import nn

from radixkv import LLM, SamplingParams
from radixkv.model import structure
from radixkv_cpu import DecoderLayers, library

pytestmark = pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")

NUM_LAYERS = 3


def make_llm(model: nn.Module, **options: Any) -> LLM:
    return LLM(model, block_size=4, num_blocks=64, **options)


@pytest.fixture
def rows_by_call(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """For each call of decoder layers, how many rows went in, and how many came out."""
    calls: list[tuple[int, int]] = []
    run = DecoderLayers.run

    def noted(self: DecoderLayers, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        output = run(self, x, *rest)
        calls.append((len(x), len(output)))
        return output

    monkeypatch.setattr(DecoderLayers, "run", noted)
    return calls


@each_variant
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_those_of_all_rows(
    variant: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, beside others that go on, and one whose own log-probabilities are wanted."""
    chance = random.Random(1)
    prompts = [
        {"prompt_token_ids": [chance.randrange(3, VOCAB_SIZE) for _ in range(length)]} for length in (2, 25, 30, 60)
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=wanted, ignore_eos=True)
        for wanted in (None, None, 1, None)
    ]

    def answers() -> list[Any]:
        llm = make_llm(build(name, {**SUPPORTED[name], **WIDE}).to(dtype), max_num_batched_tokens=37, max_num_seqs=4)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [(output.prompt_logprobs, output.outputs[0].logprobs) for output in outputs]

    @contextmanager
    def compute_all_rows(*_: Any, **__: Any) -> Iterator[None]:
        yield None

    with use(variant):
        given = answers()
        monkeypatch.setattr(structure, "nan_in_other_rows", compute_all_rows)
        assert given == answers()


def test_a_prompts_rows_end_before_the_last_layers_attention(rows_by_call: list[tuple[int, int]]) -> None:
    make_llm(build("llama", SUPPORTED["llama"])).generate(
        {"prompt_token_ids": [*range(3, 20)]}, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False
    )
    assert rows_by_call == [(17, 1), (1, 1)]


class Reading(nn.Module):
    """After the last layer, each row is computed from those before it, too."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(x + 0 * x.cumsum(1))  # which changes nothing, unless a row is no number
        return normed


def test_all_rows_are_computed_where_a_model_reads_them_at_its_end(rows_by_call: list[tuple[int, int]]) -> None:
    model = build("llama", SUPPORTED["llama"])
    model.model.norm = Reading(model.model.norm)
    make_llm(model).generate(
        {"prompt_token_ids": [*range(3, 20)]}, SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False
    )
    assert rows_by_call == [(17, 17)] * NUM_LAYERS
