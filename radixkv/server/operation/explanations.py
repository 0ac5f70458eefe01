"""Explanations in responses: how much of a prompt was cached, and why not more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from radixkv.prompts import Prompt
from radixkv.sampling_params import BeamSearchParams, SamplingParams
from radixkv.server.service import Service

# Limit for one request.
MAX_EXPLAINED = 16


class CacheExplanation(BaseModel):
    """How much of a prompt was cached at its arrival, and why not more; the fields of `PromptExplanation.as_dict`."""

    text: str
    num_prompt_tokens: int
    num_reused_tokens: int
    below: list[dict[str, Any]]
    computed: list[dict[str, Any]]
    difference: dict[str, Any] | None
    replica: str | None


async def explain_prompts(
    service: Service, prompts: Sequence[Prompt], params: SamplingParams | BeamSearchParams, tenant: str
) -> list[CacheExplanation]:
    """Why no more of the prompts would be reused now; reveals nothing of other tenants or salts.

    Where `Service.hides_prompts`, tokens of the most similar cached prompt are left out: it may be another user's.

    Raises:
        TypeError, ValueError: too many prompts, or one without tokens, or with tokens that the model lacks.
        QueueFullError, DrainingError, EngineDeadError: they may not come in now.
        ReplicasLostError: of several replicas, none answers.
    """
    if len(prompts) > MAX_EXPLAINED:
        raise ValueError(f"explain_cache: expected at most {MAX_EXPLAINED} prompts with it, got {len(prompts)}")
    prompts = [replace(prompt, read_cache=prompt.reuses_prefixes(params)) for prompt in prompts]
    explained = await service.llm.explain_prompts(prompts, tenant=tenant)
    if service.hides_prompts:
        explained = [replace(one, difference=None) for one in explained]
    return [CacheExplanation(text=str(one), **one.as_dict()) for one in explained]
