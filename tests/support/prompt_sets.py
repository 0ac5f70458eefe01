"""Random prompts for tiny models that share prefixes, and what a model answers to them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from support.model_zoo import VOCAB_SIZE

from radixkv import LLM, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def shared_prefix_prompts(seed: int, count: int, longest: int = 60) -> list[dict[str, Any]]:
    """Prompts that continue one another's prefixes, cut anywhere."""
    rng = random.Random(seed)
    prompts: list[list[int]] = [[rng.randrange(3, VOCAB_SIZE) for _ in range(longest)]]
    while len(prompts) < count:
        stem = rng.choice(prompts)[: rng.randint(0, longest)]
        prompts.append(stem + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, longest))])
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def stem_and_tails() -> list[list[int]]:
    """Prompts that share a prefix of 37 tokens, one that is all of it, and an unrelated one."""
    generator = torch.Generator().manual_seed(1)
    stem, *tails = (torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (37, 5, 20, 1))
    return [stem + tails[0], stem + tails[1], list(stem), stem + tails[0] + tails[1], tails[2]]


def tokens_of_transformers(model: Any, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """What the model itself generates greedily for each prompt alone."""
    options: dict[str, Any] = {"max_new_tokens": num_new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts]


def tokens_of(llm: LLM, prompts: list[dict[str, Any]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """The tokens of every sample, after which the cache's checks must pass."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.cache.check()
    return [sample.token_ids for output in outputs for sample in output.outputs]


def outputs_that_equal_transformers(build_it: Callable[[], torch.nn.Module]) -> list[RequestOutput]:
    """Those of `stem_and_tails` in small chunks, cold and then cached; the latter are returned."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    expected = tokens_of_transformers(build_it(), stem_and_tails(), 8)
    llm = LLM(build_it(), block_size=4, num_blocks=200, max_num_batched_tokens=16)
    inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in stem_and_tails()]
    for _ in range(2):
        outputs = llm.generate(inputs, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        llm.engine.cache.check()
    return outputs
