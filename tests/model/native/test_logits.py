"""Prepared models compute what they computed before, over blocks of a cache, in float32 and in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.model_zoo import WIDE, WIDE_EXPERTS, build
from support.prompt_sets import stem_and_tails

from radixkv import LLM, SamplingParams
from radixkv.model.loader import load_model
from radixkv.model.native.attention import NativeSelfAttention
from radixkv_cpu import library

pytestmark = pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "stablelm": {},  # a part of each head turns
    "qwen2": {},  # biases
    "qwen3": {},  # heads are normed
    "gemma": {},
    "mixtral": WIDE_EXPERTS,
    "qwen3_moe": WIDE_EXPERTS,
}


def logits(model: torch.nn.Module) -> torch.Tensor:
    """With torch's attention, so that only what stands between differs."""
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        return model(torch.arange(3, 40)[None], use_cache=False).logits.double()


@pytest.mark.parametrize("name", MODELS)
def test_logits_in_float32_are_those_of_the_original_modules(name: str) -> None:
    expected = logits(build(name, MODELS[name] | WIDE))
    given = logits(load_model(build(name, MODELS[name] | WIDE)).model)
    assert (given - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_no_further_from_float32_than_torch(name: str) -> None:
    """Fused layers round less often: but for chance, the error is at most torch's."""
    plain = build(name, MODELS[name] | WIDE).to(torch.bfloat16)
    exact = logits(build(name, MODELS[name] | WIDE).to(torch.bfloat16).float())
    theirs = (logits(plain) - exact).norm()
    given = load_model(plain).model
    assert any(isinstance(module, NativeSelfAttention) for module in given.modules())
    assert (logits(given) - exact).norm() <= 1.2 * theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_engine_against_torchs_attention_and_modules(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities of prompts that share a prefix, part of which are read from the cache."""
    options: dict[str, Any] = {"block_size": 4, "num_blocks": 200, "max_num_batched_tokens": 16}
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    results = []
    for backend in ("native", "torch"):
        monkeypatch.setattr(
            "radixkv.llm.load_model",
            lambda *args, wanted=backend == "native", **options: load_model(*args, **{**options, "native": wanted}),
        )
        llm = LLM(build("llama", WIDE).to(dtype), attention_backend=backend, **options)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in stem_and_tails()], params, use_tqdm=False)
        results.append(
            torch.tensor(
                [
                    step[token].logprob
                    for output in outputs
                    for step, token in zip(output.prompt_logprobs, output.prompt_token_ids, strict=True)
                    if step
                ]
            )
        )
    # A logarithm of a probability, not its logits, whose differences are about as large as 8 bits make them.
    bound = 1e-4 if dtype == torch.float32 else 0.1
    assert (results[0] - results[1]).abs().mean() <= bound
