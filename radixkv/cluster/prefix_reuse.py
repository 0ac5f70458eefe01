"""Whether a request reads its replica's cache: only then does it matter to it which replica holds its prefix."""

from __future__ import annotations

from radixkv.prompts import Prompt
from radixkv.sampling_params import BeamSearchParams, SamplingParams, wants_prompt_logprobs


def reuses_prefixes(prompt: Prompt, params: SamplingParams | BeamSearchParams) -> bool:
    """Whether a replica reuses cached prefixes; see `radixkv.scheduling.request.Request.reuses_prefixes`.

    Args:
        prompt: of the request; an answer that has begun needs no log-probabilities of it any more.
        params: of the request.
    """
    return prompt.read_cache and (bool(prompt.resume) or not wants_prompt_logprobs(params))
