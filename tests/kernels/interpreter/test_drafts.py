"""Drafts over the Triton backend, kernels interpreted: the same tokens as without drafts, in fewer steps."""

from __future__ import annotations

import torch
from support.drafters import Oracle, speculator
from support.model_zoo import VOCAB_SIZE, build_shallow

from radixkv import LLM, SamplingParams


def test_tokens_are_those_without_drafts() -> None:
    """With windows and sinks, two sequences that share a prefix, and some wrong drafts."""
    stem = torch.randint(3, VOCAB_SIZE, (22,), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [stem, [*stem[:18], 5]]
    every = [SamplingParams(temperature=t, seed=3, max_tokens=8, ignore_eos=True) for t in (0.0, 1.0)]

    def answers(llm: LLM) -> list[list[int]]:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], every, use_tqdm=False)
        llm.engine.cache.check()
        return [output.outputs[0].token_ids for output in outputs]

    expected = answers(LLM(build_shallow("gpt_oss"), attention_backend="torch", block_size=16, num_blocks=20))
    oracle = Oracle(error_rate=0.15, vocab_size=VOCAB_SIZE)
    oracle.sequences = [[*prompt, *tokens] for prompt, tokens in zip(prompts, expected, strict=True)]
    llm = LLM(build_shallow("gpt_oss"), attention_backend="triton", block_size=16, num_blocks=20, max_num_seqs=16)
    llm.engine._speculator = drafts = speculator(llm, [oracle])
    assert answers(llm) == expected
    counts = drafts.counts["oracle"]
    assert 6 <= counts.accepted < counts.drafted
    assert llm.engine.num_steps < 8
