"""Every supported architecture gives the tokens that transformers gives, however the work is cut up and shared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from support.model_zoo import REFUSED, SUPPORTED, WIDE_EXPERTS, build, build_supported
from support.prompt_sets import stem_and_tails

from radixkv import LLM, SamplingParams
from radixkv.errors import UnsupportedModelError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_tokens_equal_transformers_generate(name: str) -> None:
    assert_tokens_equal_transformers(partial(build_supported, name))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_of_sizes_that_compiled_code_takes(name: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    assert_tokens_equal_transformers(partial(build, name, SUPPORTED[name] | WIDE_EXPERTS | sizes))


def assert_tokens_equal_transformers(build_it: Callable[[], torch.nn.Module]) -> None:
    reference = build_it()
    expected = []
    for prompt in stem_and_tails():
        output = reference.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        expected.append(output[0, len(prompt) :].tolist())
    llm = LLM(build_it(), block_size=4, num_blocks=200, max_num_batched_tokens=16)
    inputs = [{"prompt_token_ids": prompt} for prompt in stem_and_tails()]
    for _ in range(2):  # the second time everything is cached
        outputs = llm.generate(inputs, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        llm.engine.cache.check()
    assert all(output.num_cached_tokens == len(output.prompt_token_ids) - 1 for output in outputs)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_models_that_blocks_cannot_serve_are_refused(name: str) -> None:
    model = build(name, REFUSED[name])
    with pytest.raises(
        UnsupportedModelError, match=r"replaced|layers of type|rotary positions|later tokens|mix tokens"
    ):
        LLM(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["deepseek_v3", "gemma2", "gpt_oss", "llama"])
def test_half_precision_is_no_further_from_the_truth_than_transformers(name: str, dtype: torch.dtype) -> None:
    """The mean error of log-probabilities against float32; capped scores, sinks and differing head sizes among them."""
    prompt = stem_and_tails()[3]
    exact = true_logprobs(build_supported(name), prompt)
    theirs = (true_logprobs(build_supported(name).to(dtype), prompt) - exact).abs().mean()
    llm = LLM(build_supported(name).to(dtype), block_size=4, num_blocks=200, max_num_batched_tokens=16)
    assert llm.engine.pool.key_rows[0].dtype == dtype
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    given = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].prompt_logprobs
    assert given is not None
    ours = torch.tensor([step[token].logprob for step, token in zip(given[1:], prompt[1:], strict=True) if step])
    assert (ours - exact).abs().mean() <= 1.5 * theirs


@torch.inference_mode()
def true_logprobs(model: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
    """The log-probability that the model itself gives to each token of the prompt but the first."""
    logits = model(torch.tensor([prompt])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
