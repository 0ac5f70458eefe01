"""Explanations over several replicas of why no more of a prompt would be reused."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from radixkv.cluster.replica_set import ReplicaSet
from radixkv.cluster.wire import encode_prompts
from radixkv.errors import ReplicasLostError
from radixkv.observe.prompt_explanation import PromptExplanation
from radixkv.prompts import Prompt

_log = logging.getLogger(__name__)


async def explain_by_replicas(replicas: ReplicaSet, prompts: Sequence[Prompt], tenant: str) -> list[PromptExplanation]:
    """Each prompt's explanation, by the replica that would reuse most of it, of those that explain every prompt.

    Raises:
        ReplicasLostError: none answers.
    """
    answers = await replicas.ask_all("POST", "/explain", encode_prompts(prompts, tenant))
    each = []
    for name, answer in answers.items():
        if answer is None or not answer.is_success:
            continue
        try:
            explained = zip(prompts, answer.json(), strict=True)
            each.append([replace(PromptExplanation.from_dict(one), replica=name) for _, one in explained])
        except (ValueError, TypeError, KeyError) as error:
            _log.warning("replica %r does not explain the prompts, but answers otherwise: %r", name, error)
    if not each:
        raise ReplicasLostError("no replica explained the prompts; ask again")
    return [max(column, key=_num_known_tokens) for column in zip(*each, strict=True)]


def _num_known_tokens(explanation: PromptExplanation) -> int:
    return explanation.num_reused_tokens + sum(part.num_tokens for part in explanation.below)
