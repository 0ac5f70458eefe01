"""Pins over several replicas: each is on the replica that holds most of its prefix, since requests for it go there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from http import HTTPStatus
from urllib.parse import quote

from radixkv.cache import PinQuotaExceeded
from radixkv.cluster.replica_calls import all_answers
from radixkv.cluster.replica_set import ReplicaSet
from radixkv.cluster.wire import encode_pin, refusal_of
from radixkv.errors import ReplicasLostError
from radixkv.prompts import Prompt
from radixkv.routing import Placement, Router, prompt_hashes
from radixkv.server.operation.pins import AdministratorPins, PinState

_log = logging.getLogger(__name__)

# The answer to a message cannot begin before it is known how much of its prefixes was kept.
_SECONDS_TO_PIN = 1.0


async def keep_prefix(replicas: ReplicaSet, tenant: str, namespace: str, token_ids: Sequence[int], ttl: float) -> int:
    """Pin a prefix for ``ttl`` seconds on the replica that holds most of it, which bounds how much each tenant may pin.

    Returns:
        How many tokens are kept: 0 where no replica holds a whole block of it, or that one does not answer soon.
    """
    router = replicas.router
    if router is None or len(token_ids) < router.block_size:
        return 0
    name = router.holder(prompt_hashes(token_ids, namespace, router.block_size))
    if name is None:
        return 0
    try:
        async with asyncio.timeout(_SECONDS_TO_PIN):
            answer = await replicas.ask(name, "POST", "/pin", encode_pin(tenant, namespace, token_ids, ttl))
        return int(answer.json()["num_tokens"]) if answer is not None and answer.is_success else 0
    except (TimeoutError, ValueError, KeyError, TypeError) as error:
        _log.info("replica %r did not pin a prefix: %r", name, error)
        return 0


def _placed(router: Router, prompt: Prompt) -> Placement | None:
    """On the replica that holds most of a prompt or, where none holds any, on the one that a request for it would go to.

    Returns:
        None: no replica is up.
    """
    hashes = prompt_hashes(prompt.token_ids, prompt.namespace, router.block_size)
    holder = router.holder(hashes)
    others = [] if holder is None else [name for name in router.replicas if name != holder]
    return router.choose(hashes, len(prompt.token_ids), excluded=others)


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
        """Pin it where most of it is cached; see `AdministratorPins`. What has to be computed counts as work of that replica.

        Raises:
            PinQuotaExceeded: more would be pinned there than may be.
            ReplicasLostError: no replica is up, or that one does not answer.
            ValueError: it is refused, as it would be by any.
        """
        router = self._replicas.router
        if router is None or (placement := _placed(router, prompt)) is None:
            raise ReplicasLostError("no replica is up")
        name, content = placement.replica, encode_pin(None, prompt.namespace, prompt.token_ids, ttl)
        try:
            answer = await self._replicas.ask(name, "POST", "/pin", content)
            if answer is not None and answer.is_success:
                router.prefilled(placement)
        finally:
            router.finish(placement)
        if answer is not None and answer.status_code == HTTPStatus.CONFLICT:
            raise PinQuotaExceeded(**answer.json())
        if answer is not None and answer.status_code == HTTPStatus.BAD_REQUEST:
            raise refusal_of(answer.json())
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
