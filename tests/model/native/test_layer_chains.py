"""Decoder layers that follow one another run in one call, and no answer shows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.cpu_variants import each_variant, use
from support.model_zoo import SUPPORTED, WIDE, build
from torch import nn

from radixkv import LLM, RequestOutput, SamplingParams
from radixkv.model import structure
from radixkv.model.native import watch_chains
from radixkv.model.native.layer import NativeDecoderLayer
from radixkv_cpu import DecoderLayers, library

pytestmark = pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")

PROMPT = [*range(3, 30)]


def make_llm(model: nn.Module) -> LLM:
    return LLM(model, block_size=4, num_blocks=64)


def answer(llm: LLM) -> RequestOutput:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    return llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[DecoderLayers]:
    """Every call, in order."""
    made: list[DecoderLayers] = []
    run = DecoderLayers.run

    def noted(self: DecoderLayers, *args: Any) -> torch.Tensor:
        made.append(self)
        return run(self, *args)

    monkeypatch.setattr(DecoderLayers, "run", noted)
    return made


# Of three layers. Gemma 3 turns those that see a window by other angles; mixtures of experts are computed layer by layer.
@pytest.mark.parametrize(
    ("name", "num_calls"), [("llama", 1), ("mistral", 1), ("gemma2", 1), ("gemma3_text", 3), ("qwen3_moe", 3)]
)
def test_layers_are_joined_as_far_as_they_follow_one_another(
    name: str, num_calls: int, calls: list[DecoderLayers]
) -> None:
    answer(make_llm(build(name, {**SUPPORTED[name], **WIDE})))
    assert len({*calls}) == num_calls
    assert len(calls) == 12 * num_calls


@each_variant
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined_layers_give_what_each_gives_by_itself(
    variant: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given() -> list[Any]:
        output = answer(make_llm(build(name, {**SUPPORTED[name], **WIDE}).to(dtype))).outputs[0]
        return [output.token_ids, output.logprobs]

    @contextmanager
    def watch_no_chains(model: nn.Module) -> Iterator[list[list[NativeDecoderLayer]]]:
        with watch_chains(model) as chains:
            yield chains
        chains[:] = [[layer] for chain in chains for layer in chain]

    with use(variant):
        joined = given()
        monkeypatch.setattr(structure, "watch_chains", watch_no_chains)
        assert joined == given()


class AddsAnEarlierOne(nn.Module):
    """After the last layer, adds what an earlier one gave."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.norm, self.earlier = model.norm, torch.zeros(())
        model.layers[0].register_forward_hook(self.keep)
        model.norm = self

    def keep(self, _: nn.Module, __: object, output: torch.Tensor) -> None:
        self.earlier = output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(x + self.earlier[:, : x.shape[1]])
        return normed


def test_layers_stay_apart_where_a_model_reads_what_stands_between_them(calls: list[DecoderLayers]) -> None:
    model = build("llama", SUPPORTED["llama"])
    make_llm(model)  # a hook runs on what has taken the layer's place
    AddsAnEarlierOne(model.model)
    answer(make_llm(model))
    assert len({*calls}) == 3


def test_a_model_that_another_engine_has_run_is_joined_anew(calls: list[DecoderLayers]) -> None:
    model = build("llama", SUPPORTED["llama"])
    first = answer(make_llm(model)).outputs[0].token_ids
    assert answer(make_llm(model)).outputs[0].token_ids == first
    assert len({*calls}) == 2
