"""What only a cache itself can tell or do, over several replicas: explanations, and the administrator's pins."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from urllib.parse import quote

from radixkv.cache import PinQuotaExceeded
from radixkv.cluster.answers import all_answers
from radixkv.cluster.replica_set import ReplicaSet
from radixkv.cluster.wire import encode_pin, encode_prompts, error_of
from radixkv.errors import ReplicasLostError
from radixkv.observe.explain import PromptExplanation
from radixkv.prompts import Prompt
from radixkv.server.pins import AdministratorPins, PinState

_log = logging.getLogger(__name__)


async def explain_by_replicas(replicas: ReplicaSet, prompts: Sequence[Prompt], tenant: str) -> list[PromptExplanation]:
    """Each prompt's explanation, by the replica that would reuse most of it.

    Args:
        replicas: those that are up are asked. An answer that does not explain every prompt is left out.
        prompts: tokenized.
        tenant: on whose behalf.

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


class ReplicaPins(AdministratorPins):
    """The administrator's pins on all replicas. Each is on one replica, and lasts as long as that runs."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas

    async def listed(self) -> list[PinState]:
        """See `AdministratorPins`.

        Raises:
            ReplicasLostError: some are down, or do not answer.
        """
        answers = all_answers(await self._replicas.ask_all("GET", "/pins"))
        return [PinState(**{**pin, "replica": name}) for name, answer in answers.items() for pin in answer.json()]

    async def pin(self, prompt: Prompt, ttl: float | None) -> PinState | None:
        """Pin it where most of it is cached; see `AdministratorPins`.

        Raises:
            PinQuotaExceeded: more would be pinned there than may be.
            ReplicasLostError: no replica is up, or that one does not answer.
            ValueError: it is refused, as it would be by any.
        """
        name = self._replicas.place_prefix(prompt.token_ids, prompt.namespace)
        if name is None:
            raise ReplicasLostError("no replica is up")
        content = encode_pin(None, prompt.namespace, prompt.token_ids, ttl)
        answer = await self._replicas.ask(name, "POST", "/pin", content)
        if answer is not None and answer.status_code == HTTPStatus.CONFLICT:
            raise PinQuotaExceeded(**answer.json())
        if answer is not None and answer.status_code == HTTPStatus.BAD_REQUEST:
            refusal = answer.json()
            raise error_of(refusal) or ValueError(refusal["error"])
        made = all_answers({name: answer})[name].json()
        return None if made is None else PinState(**{**made, "replica": name})

    async def release(self, name: str) -> bool:
        """See `AdministratorPins`.

        Raises:
            ReplicasLostError: none of those that answer has it, and some are down, or do not answer.
        """
        answers = await self._replicas.ask_all("DELETE", f"/pins/{quote(name, safe='')}")
        if any(answer is not None and answer.is_success and answer.json() for answer in answers.values()):
            return True
        all_answers(answers)
        return False
