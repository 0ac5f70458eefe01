"""One replica of a set, and how it is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

from radixkv.cluster.description import ReplicaDescription
from radixkv.cluster.load import ReplicaLoad
from radixkv.scheduling.tenant_share import TenantShare


@dataclass(eq=False, slots=True)
class Member:
    """One replica of the set.

    Attributes:
        joined: done when it is up for the first time, or with the error that keeps it from that.
        description: when it was last reached; None: never.
        client: with which it is up; None: it is down.
        load: its latest report; None: it is down, or did not report yet.
        sent_shares: what each tenant may have, as it last confirmed it; None: it confirmed nothing yet.
        sending: the task that sends it the newest shares; None: there was none yet.
        is_behind: whether it has not confirmed the newest shares, which was logged.
        leaving: it was removed, and is followed until its streams have ended and it has reported what it counted.
        task: the one that follows it.
    """

    name: str
    url: str
    joined: asyncio.Future[None]
    description: ReplicaDescription | None = None
    client: httpx.AsyncClient | None = None
    load: ReplicaLoad | None = None
    sent_shares: Mapping[str, TenantShare] | None = None
    sending: asyncio.Task[None] | None = None
    is_behind: bool = False
    leaving: bool = False
    task: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return f"replica {self.name!r} at {self.url}"

    def give_up(self) -> None:
        """End the wait for it, if it has not been up: it comes no more."""
        if not self.joined.done():
            self.joined.set_exception(ConnectionError(f"replica {self.name!r} was removed before it was up"))
