"""Small engines, and what of their answers must depend neither on drafts nor on when steps are launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from support.drafters import use_ticks
from support.model_zoo import VOCAB_SIZE, build_supported

from radixkv import LLM, SamplingParams
from radixkv.drafting import Drafter

SMALL: dict[str, Any] = {"block_size": 4, "num_blocks": 40, "max_num_seqs": 5, "max_num_batched_tokens": 24}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 5, "min_p": 0.01},
    {"temperature": 0.7, "n": 3},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"temperature": 0.8, "repetition_penalty": 1.3},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 1.0, "min_tokens": 4},
    {"temperature": 0.0, "stop_token_ids": list(range(0, VOCAB_SIZE, 7))},
    {"temperature": 0.9, "logit_bias": {5: 3.0, 6: -100.0}, "allowed_token_ids": list(range(0, VOCAB_SIZE, 3))},
]
Work = list[tuple[list[int], SamplingParams]]


@st.composite
def work(draw: st.DrawFn) -> Work:
    """Requests with common prefixes that differ in length, end and sampling parameters; some are asked twice."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 5)))
    stem = torch.randint(3, VOCAB_SIZE, (30,), generator=generator).tolist()
    requests = []
    for number in range(draw(st.integers(1, 7))):
        prompt = [*stem[: draw(st.integers(1, 30))], 3 + number % 2, *stem[: draw(st.integers(0, 6))]]
        kind = draw(st.sampled_from(KINDS))
        length = draw(st.integers(kind.get("min_tokens", 1), 20))
        params = SamplingParams(max_tokens=length, seed=number, ignore_eos=draw(st.booleans()), **kind)
        requests += [(prompt, params)] * draw(st.integers(1, 2))
    return requests


def plain_llm() -> LLM:
    """Without drafts."""
    return LLM(build_supported("llama"), **SMALL)


def drafting(drafters: Sequence[Drafter] = (), architecture: str = "llama", **options: Any) -> LLM:
    """With drafts from the tree, and of these drafters."""
    config = {"method": "tree", "num_speculative_tokens": 6, "drafters": drafters}
    llm = LLM(build_supported(architecture), speculative_config=config, **{**SMALL, **options})
    use_ticks(llm)
    return llm


def answers(llm: LLM, requests: Work) -> list[Any]:
    """All that must not depend on how they are computed."""
    llm.reset_prefix_cache()
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in requests], [params for _, params in requests], use_tqdm=False
    )
    llm.engine.cache.check()
    assert llm.engine.cache.num_evictable_blocks == llm.engine.cache.num_held_blocks
    assert llm.reset_prefix_cache()
    return [
        [
            (sample.token_ids, sample.finish_reason, sample.stop_reason, rounded(sample.logprobs), of_prompt)
            for sample in output.outputs
        ]
        for output in outputs
        for of_prompt in [rounded([each for each in output.prompt_logprobs or [] if each])]
    ]


def rounded(logprobs: Any) -> Any:
    return logprobs and [
        {i: (pytest.approx(p.logprob, abs=1e-3), p.rank) for i, p in each.items()} for each in logprobs
    ]
