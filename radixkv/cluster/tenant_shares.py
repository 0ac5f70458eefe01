"""Sends what each tenant may have to the replicas, to each one until it has confirmed the newest."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

import httpx

from radixkv.cluster.connection import SECONDS_TO_ANSWER
from radixkv.cluster.member import Member
from radixkv.cluster.wire import encode_shares
from radixkv.scheduling.tenant_share import TenantShare

_log = logging.getLogger(__name__)


class TenantShares:
    """What each tenant may have, as it was set last, and the tasks that send it to replicas.

    Args:
        headers: with the replicas' secret.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers
        self._newest: Mapping[str, TenantShare] | None = None

    async def set(self, shares: Mapping[str, TenantShare], members: Iterable[Member]) -> None:
        """Set what each tenant may have from now on; these members have confirmed it at the end, or a warning names them."""
        self._newest = shares
        tasks = [task for member in members if (task := self.start_sending(member)) is not None]
        if tasks:
            await asyncio.wait(tasks)

    def start_sending(self, member: Member) -> asyncio.Task[None] | None:
        """Send the newest to a replica that is up, unless it has confirmed it: in one task, so that none overtakes another.

        Returns:
            The task; None: it has confirmed the newest.
        """
        if member.sent_shares is self._newest:
            return None
        if member.sending is None or member.sending.done():
            assert member.client is not None
            member.sending = asyncio.ensure_future(self._send_newest(member, member.client))
        return member.sending

    async def _send_newest(self, member: Member, client: httpx.AsyncClient) -> None:
        try:
            while member.sent_shares is not self._newest:
                await self.send(member, client)
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client was closed meanwhile
            if not member.is_behind:
                member.is_behind = True
                _log.warning("sending tenants' shares to replica %r failed, and is tried again: %r", member.name, error)

    async def send(self, member: Member, client: httpx.AsyncClient) -> None:
        """Send the newest to a replica, unless it has confirmed it; it need not be up with this client.

        Raises:
            httpx.HTTPError: it does not confirm it.
            RuntimeError: the client is closed.
        """
        shares = self._newest
        if shares is None or member.sent_shares is shares:
            return
        body = encode_shares(shares)
        answer = await client.put("/tenants", content=body, headers=self._headers, timeout=SECONDS_TO_ANSWER)
        answer.raise_for_status()
        member.sent_shares, member.is_behind = shares, False

    def forget(self, member: Member) -> None:
        """The process that confirmed them is gone: the next one has confirmed nothing."""
        if member.sending is not None:
            member.sending.cancel()
        member.sent_shares, member.is_behind = None, False
