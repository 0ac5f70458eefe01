"""Every language model that transformers knows: it gives transformers' tokens, or is refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support.model_zoo import IN_SPACE, MULTIMODAL, SUPPORTED, build, build_multimodal
from support.prompt_sets import stem_and_tails, tokens_of_transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from radixkv import LLM, SamplingParams
from radixkv.errors import UnsupportedModelError

# Settings beyond the common ones that some configurations need to make a small model.
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_FULL = {"layer_types": ["full_attention"] * 3}
_GUESSES: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    _EXPERTS,
    {**_EXPERTS, "num_key_value_heads": 4},
    IN_SPACE,
    {**_EXPERTS, **IN_SPACE},
    {**_EXPERTS, **_FULL, "shared_expert_intermediate_size": 24},
    {**SUPPORTED["deepseek_v3"], "v_head_dim": 8},
    {**SUPPORTED["deepseek_v3"], **_FULL},
)
_MOST_PARAMETERS = 30_000_000
_NUM_TOKENS = 12
_TEXT_ALONE = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*SUPPORTED}
_WITH_IMAGES_OR_AUDIO = {*MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES} - {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MULTIMODAL}


def small_model(build: Callable[[str, dict[str, Any]], Any], name: str) -> transformers.PreTrainedModel:
    """A random model of the architecture that computes something; skips where no guess makes one."""
    reasons = []
    for options in _GUESSES:
        try:
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in build(name, options).parameters())
            if size > _MOST_PARAMETERS:
                raise ValueError(f"{size:,} parameters")
            model = build(name, options).eval()
            if not model(input_ids=torch.arange(5, 25)[None]).logits.isfinite().all():
                raise ValueError("it computes no numbers")
        except Exception as error:  # from code that is not ours, for a guessed configuration
            reasons.append(f"{type(error).__name__}: {error}")
        else:
            return model
    pytest.skip(f"no small model: {reasons[0]:.200}")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("build", "name"),
    [(build, name) for name in sorted(_TEXT_ALONE)]
    + [(build_multimodal, name) for name in sorted(_WITH_IMAGES_OR_AUDIO)],
)
def test_it_gives_the_tokens_of_transformers_or_is_refused(build: Callable[..., Any], name: str) -> None:
    model = small_model(build, name)
    try:
        llm = LLM(small_model(build, name), block_size=4, num_blocks=200, max_num_batched_tokens=16, dtype="float32")
    except UnsupportedModelError:
        return
    expected = tokens_of_transformers(model, stem_and_tails(), _NUM_TOKENS)
    params = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    for _ in range(2):  # the second time everything is cached
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in stem_and_tails()], params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
