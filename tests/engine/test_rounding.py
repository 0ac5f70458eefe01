"""On a CPU, native code rounds alike however much of a prompt was cached, and in whatever pieces it was computed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.cpu_variants import each_variant, use
from support.model_zoo import SUPPORTED, VOCAB_SIZE, WIDE, build

from radixkv import LLM, SamplingParams
from radixkv_cpu import library

pytestmark = pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")

LENGTHS = (1, 2, 17, 33, 90, 300)
# Which native code takes.
EXPERTS = {"num_experts": 16, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64}


@each_variant
@pytest.mark.parametrize(
    ("name", "dtype", "quantization"),
    [
        ("llama", torch.float32, None),
        ("llama", torch.bfloat16, None),
        ("mistral", torch.float32, None),
        ("qwen3", torch.bfloat16, None),
        ("llama", torch.bfloat16, "int4"),
        # Of which torch computed the routers, and the layers that are no `nn.Linear`.
        ("qwen3_moe", torch.float32, None),
        ("deepseek_v2", torch.float32, None),
        ("gpt2", torch.float32, None),
    ],
)
def test_answers_do_not_depend_on_what_was_cached(
    variant: str, dtype: torch.dtype, name: str, quantization: str | None
) -> None:
    """A prompt that is new, cached, cached in part or computed in chunks: the same log-probabilities, to the last bit."""
    chance = random.Random(0)
    tokens = [chance.randrange(3, VOCAB_SIZE) for _ in range(max(LENGTHS))]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)

    def answer(llm: LLM, prompt: list[int]) -> list[dict[int, float]]:
        (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        assert output.outputs[0].logprobs is not None
        return [{token: each.logprob for token, each in step.items()} for step in output.outputs[0].logprobs]

    def engine(**options: Any) -> LLM:
        return LLM(
            build(name, {**SUPPORTED[name], **WIDE, **EXPERTS}).to(dtype),
            block_size=16,
            num_blocks=64,
            quantization=quantization,
            **options,
        )

    with use(variant):
        new, chunked = engine(), engine(max_num_batched_tokens=23, max_num_seqs=4)
        for length in LENGTHS:
            prompt = tokens[:length]
            expected = answer(new, prompt)
            assert answer(new, prompt) == expected
            assert answer(chunked, prompt) == expected
            new.reset_prefix_cache()
            chunked.reset_prefix_cache()
            answer(new, [*tokens[: length // 2], 1, 1])
            assert answer(new, prompt) == expected
            new.reset_prefix_cache()
