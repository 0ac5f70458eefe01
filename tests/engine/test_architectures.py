"""Every supported architecture gives the tokens that transformers gives, however the work is cut up and shared."""

from __future__ import annotations

import pytest
import torch
from model_zoo import REFUSED, SUPPORTED, VOCAB_SIZE, build, build_supported

from radixkv import LLM, SamplingParams
from radixkv.engine.errors import UnsupportedModelError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def prompts() -> list[list[int]]:
    """Prompts that share a prefix of 37 tokens, one that is all of it, and a stranger."""
    generator = torch.Generator().manual_seed(1)
    stem, *tails = (torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (37, 5, 20, 1))
    return [stem + tails[0], stem + tails[1], list(stem), stem + tails[0] + tails[1], tails[2]]


@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_tokens_equal_transformers_generate(name: str) -> None:
    reference = build_supported(name)
    expected = []
    for prompt in prompts():
        output = reference.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        expected.append(output[0, len(prompt) :].tolist())
    llm = LLM(build_supported(name), block_size=4, num_blocks=200, max_num_batched_tokens=16)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts()]
    for _ in range(2):  # the second time everything is cached
        outputs = llm.generate(inputs, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        llm.engine.cache.check()
    assert all(output.num_cached_tokens == len(output.prompt_token_ids) - 1 for output in outputs)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_models_that_blocks_cannot_serve_are_refused(name: str) -> None:
    model = build(name, REFUSED[name])
    with pytest.raises(UnsupportedModelError, match=r"replaced|layers of type|rotary positions"):
        LLM(model)
