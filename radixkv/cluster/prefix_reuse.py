"""Whether a request reads its replica's cache: only then does it matter to it which replica holds its prefix."""

from __future__ import annotations

from radixkv.prompts import Prompt
from radixkv.sampling_params import BeamSearchParams, SamplingParams, wants_prompt_logprobs


def reuses_prefixes(prompt: Prompt, params: SamplingParams | BeamSearchParams, *, has_tokens: bool) -> bool:
    """Whether a replica reuses cached prefixes; see `radixkv.scheduling.request.Request.reuses_prefixes`.

    Args:
        prompt: of the request.
        params: of the request.
        has_tokens: whether its answer has begun, so that it needs no log-probabilities of the prompt any more.
    """
    return prompt.read_cache and (has_tokens or not wants_prompt_logprobs(params))
