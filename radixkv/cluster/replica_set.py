"""Which replicas there are, which of them are up, and what they hold.

Each replica is followed by a task of its own::

    connect ──> description: the same prompts as the first? ──> events: up, and the router has what it holds
       ^                                                             │ they end
       └──── wait a little <──── no answer: down, its streams go elsewhere ◄─┘ (or the reader was too slow, and begins anew)
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Mapping

import httpx

from radixkv.cache.arguments import is_number
from radixkv.cluster.connection import SECONDS_TO_ANSWER, check_secret, connect
from radixkv.cluster.counters import CounterTotals
from radixkv.cluster.generations import Generations, MismatchError
from radixkv.cluster.idle_timeout import idle_timeout
from radixkv.cluster.load import ReplicaLoad
from radixkv.cluster.member import Member
from radixkv.cluster.records import Kind, RecordReader, decode_load, update_router
from radixkv.cluster.replica_calls import PendingCalls, fetch_description
from radixkv.cluster.streams import ReplicaStreams
from radixkv.cluster.tenant_shares import TenantShares
from radixkv.cluster.wire import INSTANCE_HEADER, private_headers
from radixkv.routing import Router
from radixkv.scheduling.tenant_share import TenantShare

_log = logging.getLogger(__name__)

# A replica sends something at least once a second. Events that end sooner than this are not read again at once.
_SECONDS_OF_SILENCE = 10.0
_SECONDS_BETWEEN_ATTEMPTS = 0.5
# How long streams stay on a replica that is drained: others that are drained together with it have said so by then.
_SECONDS_TO_STAY = 1.0
# Between two looks at a removed replica, and how many find no stream and no call there before it is left: by then it has
# reported, as it does every fifth of a second, what it counted for the last one.
_SECONDS_BETWEEN_LOOKS, _LOOKS_TO_REPORT = 0.05, 8


class ReplicaSet:
    """The replicas of one application. It belongs to the event loop that uses it first.

    Args:
        secret: the replicas'.
        wait_seconds: how long a request waits while no replica is up.
        connect: makes the client of a replica from its url.

    Attributes:
        secret: the replicas'.
        counters: of all replicas that ever were up.
        generations: of the replicas that are up.
        wanted: names of the replicas that are to be in the set; until they are added, they count as down.

    Raises:
        TypeError, ValueError: the secret or ``wait_seconds`` is impossible.
    """

    def __init__(
        self,
        secret: str,
        *,
        wait_seconds: float = 30.0,
        connect: Callable[[str], httpx.AsyncClient] = connect,
    ) -> None:
        check_secret(secret)
        if not (is_number(wait_seconds) and wait_seconds >= 0):
            raise ValueError(f"wait_seconds: expected a number of at least 0, got {wait_seconds!r}")
        self.generations = Generations()
        self.counters = CounterTotals()
        self.secret = secret
        self.wanted: Collection[str] = ()
        self._sender = secrets.randbits(64)
        self._headers = private_headers(secret, self._sender)
        self._wait_seconds = wait_seconds
        self._connect = connect
        self._members: dict[str, Member] = {}
        self._leaving: dict[Member, asyncio.Task[None]] = {}  # what finishes the removal of each
        self._calls = PendingCalls(self._headers)
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._streams: ReplicaStreams | None = None
        self._tenants = TenantShares(self._headers)

    # -- membership ----------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Names of all replicas, including those that are down, or wanted."""
        return list(dict.fromkeys([*self._members, *self.wanted]))

    @property
    def added(self) -> list[str]:
        """Names of the replicas that were added and not removed."""
        return list(self._members)

    @property
    def available(self) -> list[str]:
        """Names of the replicas that requests are sent to."""
        return [] if self.router is None else self.router.replicas

    async def add(self, name: str, url: str) -> None:
        """Send requests to a replica from now on. When this returns, the router knows which blocks it holds.

        Args:
            name: for logs and metrics.
            url: ``http://host:port`` or ``unix:///path``, where it serves `replica_app`.

        Raises:
            ValueError: there is one of this name, or the url is impossible.
            MismatchError: it cannot take the requests that the first replica takes, or is up under another name.
            ConnectionError: it does not answer, or refuses the secret.
        """
        if name in self._members:
            raise ValueError(f"name: a replica {name!r} is there already")
        client = self._connect(url)  # an impossible one is refused before anything is changed
        member = self._members[name] = Member(name, url, asyncio.get_running_loop().create_future())
        member.task = asyncio.ensure_future(self._follow(member, client))
        try:
            await member.joined
        except BaseException:
            if self._members.get(name) is member:
                self._begin_removal(member)
            raise

    async def remove(self, name: str) -> None:
        """Send a replica nothing more, and continue its streams elsewhere; wait for those that no other one can continue, and
        for what it counts until then.

        The name is free at once. Where the wait is cancelled, the removal goes on.

        Raises:
            KeyError: there is none of this name.
        """
        await asyncio.shield(self._begin_removal(self._members[name]))

    def _begin_removal(self, member: Member) -> asyncio.Task[None]:
        """Take a member out of the set; what is returned is done when its streams have ended, and nothing follows it."""
        del self._members[member.name]
        member.give_up()
        self._take_out(member)
        member.leaving = True
        self._leaving[member] = asyncio.ensure_future(self._finish_removal(member))
        return self._leaving[member]

    async def _finish_removal(self, member: Member) -> None:
        # It is followed meanwhile: its counters arrive; and if it falls silent, the streams count as lost.
        client, num_idle = member.client, 0
        while member in self._leaving and client is not None and num_idle < _LOOKS_TO_REPORT:
            self.streams.move(client)
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
            is_busy = self.streams.num_on(client) or client in self._calls
            num_idle = 0 if is_busy else num_idle + 1
        member.client = None  # so that no call is begun while its connections are closed
        await self._stop_following(member)
        if client is not None:
            await client.aclose()
        self._leaving.pop(member, None)

    async def close(self) -> None:
        """Leave all replicas; calls of `add` that wait end as if theirs were removed. Streams must have ended."""
        members, removals = list(self._members.values()), list(self._leaving.values())
        self._leaving.clear()  # which ends the wait for their streams
        for member in members:
            member.give_up()
        await asyncio.gather(*map(self._stop_following, members), *removals)
        for member in members:
            self._take_out(member)
        self._members.clear()

    async def _stop_following(self, member: Member) -> None:
        tasks = [task for task in (member.task, member.sending) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if member.client is not None:
            await member.client.aclose()

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def streams(self) -> ReplicaStreams:
        """Answers requests.

        Raises:
            RuntimeError: there was no replica yet.
        """
        if self._streams is None:
            raise RuntimeError("there was no replica yet: call add first")
        return self._streams

    @property
    def router(self) -> Router | None:
        """Has what each replica holds; None: there was no replica yet."""
        return None if self._streams is None else self._streams.router

    @property
    def loads(self) -> dict[str, ReplicaLoad]:
        """The latest report of each replica that is up, by its name."""
        return {name: member.load for name, member in self._members.items() if member.load is not None}

    def unready_reason(self) -> str | None:
        """Why no request can be answered now; None: one can."""
        return None if self.available else "no replica is up"

    async def set_tenants(self, tenants: Mapping[str, TenantShare]) -> None:
        """Set each tenant's share on every replica; replicas that come later, or do not confirm it now, get it later."""
        await self._tenants.set(tenants, [member for member in self._members.values() if member.client is not None])

    async def ask(self, name: str, method: str, path: str, content: bytes = b"") -> httpx.Response | None:
        """Ask one replica; None: it is down, or does not answer.

        Args:
            name: the replica's.
            method: of HTTP.
            path: of `replica_app`.
            content: the body.
        """
        return await self._calls.begin(self._clients.get(name), method, path, content)

    async def ask_all(
        self, method: str, path: str, content: bytes = b"", *, leaving: bool = False
    ) -> dict[str, httpx.Response | None]:
        """Send the same request to all replicas.

        Args:
            method: of HTTP.
            path: of `replica_app`.
            content: the body.
            leaving: whether replicas that were removed are asked, too, while they finish streams. They are called by name
                and url, since another replica may have the name by now.

        Returns:
            The answers by name; None for those that are down, or do not answer.
        """
        clients = {name: self._clients.get(name) for name in self.names}
        if leaving:
            clients |= {f"{each.name} at {each.url}": each.client for each in self._leaving if each.client is not None}
        asking = [self._calls.begin(client, method, path, content) for client in clients.values()]
        return dict(zip(clients, await asyncio.gather(*asking), strict=True))

    # -- following one replica -----------------------------------------------------------------------------------

    async def _follow(self, member: Member, client: httpx.AsyncClient | None) -> None:
        last_complaint, loop = "", asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                try:
                    await self._follow_once(member, member.client or client or self._connect(member.url))
                except Exception:
                    # Within the outer try, so that an error of a stream does not end the following of its replica.
                    if member.client is not None:
                        await self._mark_down(member)
                    raise
                last_complaint = ""
                draining = member.load is not None and member.load.draining
                if not draining and loop.time() - began > _SECONDS_OF_SILENCE:
                    continue  # the replica was read too slowly, or is gone: the next attempt finds out
            except Exception as error:
                if member.leaving:
                    return
                expected = isinstance(error, MismatchError | ConnectionError)
                complaint = str(error) if expected else f"{member}: {error!r}"
                if not expected and complaint != last_complaint:
                    _log.error("replica %r cannot be followed", member.name, exc_info=error)
                if not member.joined.done():
                    member.joined.set_exception(error if expected else ConnectionError(complaint))
                    return
                if expected and complaint != last_complaint:
                    _log.warning("%s", complaint)
                last_complaint = complaint
            finally:
                client = None
            await asyncio.sleep(_SECONDS_BETWEEN_ATTEMPTS)

    async def _follow_once(self, member: Member, client: httpx.AsyncClient) -> None:
        """Read a replica's events to their end. If the replica does not come up with this client, the client is closed.

        Raises:
            ConnectionError: it does not answer, or was up and falls silent.
            MismatchError: it cannot take the requests that the others take.
        """
        try:
            # A replica that is up has made its own description already.
            timeout = _SECONDS_OF_SILENCE if member.client is client else SECONDS_TO_ANSWER
            description = await fetch_description(member, client, self._headers, timeout)
            self.generations.check(member, description)
            old = member.description
            if old is not None and old.instance != description.instance:  # it was restarted meanwhile
                if member.client is client:
                    await self._mark_down(member)
                    client = self._connect(member.url)
                self._tenants.forget(member)  # it may have confirmed them without ever being up
            member.description = description
            client.headers[INSTANCE_HEADER] = description.instance
            if member.client is not client:
                await self._tenants.send(member, client)
            async with (
                idle_timeout(_SECONDS_OF_SILENCE) as restart_timeout,
                client.stream("GET", "/events", headers=self._headers) as response,
            ):
                response.raise_for_status()
                reader = RecordReader()
                async for data in response.aiter_bytes():
                    restart_timeout()
                    for kind, payload in reader.read(data):
                        self._note(member, client, kind, payload)
            if member.client is not client:
                raise ConnectionError(f"{member}: expected events, and they ended")
        except TimeoutError as error:
            raise ConnectionError(f"{member}: it has been silent for {_SECONDS_OF_SILENCE:g} seconds") from error
        except httpx.HTTPError as error:
            # Where a replica that is up breaks off without having been silent, the next attempt finds out its state.
            broke_off = isinstance(error, httpx.TransportError) and not isinstance(error, httpx.TimeoutException)
            if not broke_off or member.client is not client:
                raise ConnectionError(f"{member}: {error!r}") from error
        finally:
            if member.client is not client:
                await client.aclose()

    def _put_up(self, member: Member, client: httpx.AsyncClient) -> None:
        """Send a replica requests. The first one that gets here has the streams and their router made."""
        description = member.description
        assert description is not None
        self.generations.check(member, description)  # again: none may have been up when it was described
        for other in self._members.values():
            there = None if other is member or other.client is None else other.description
            if there is not None and there.instance == description.instance:
                raise MismatchError(f"{member} is {other}: it would be counted twice")
        if self._streams is None:
            self._streams = ReplicaStreams(
                Router(description.identity["block_size"]),
                self._clients,
                self.secret,
                sender=self._sender,
                generations=self.generations.by_replica,
                rooms=self.generations.rooms,
                vocab_size=description.identity["vocab_size"],
                wait_seconds=self._wait_seconds,
            )
        member.client = self._clients[member.name] = client
        self.generations.add(member.name, description)
        self._streams.router.add(member.name, caches=description.identity["enable_prefix_caching"])
        _log.info("replica %r is up at %s", member.name, member.url)

    def _note(self, member: Member, client: httpx.AsyncClient, kind: Kind, payload: bytes) -> None:
        if kind is Kind.LOAD:
            if member.client is not None:  # otherwise its engine is busy, and what it holds is not listed yet
                self._note_load(member, client, decode_load(payload))
            return
        if member.leaving:
            return
        if member.client is None:
            if kind is not Kind.HELD:
                raise ConnectionError(f"{member}: expected HELD as its first record, got {kind.name}")
            self._put_up(member, client)
        update_router(self.streams.router, member.name, kind, payload)

    def _note_load(self, member: Member, client: httpx.AsyncClient, load: ReplicaLoad) -> None:
        assert member.description is not None
        self.counters.report(member.description.instance, load.counters, num_up=len(self._members))
        if member.leaving:
            return
        member.load = load
        if load.draining:
            self.streams.router.remove(member.name)
            asyncio.get_running_loop().call_later(_SECONDS_TO_STAY, self.streams.move, client)
        self.streams.router.report(member.name, load.prefill_seconds_per_token)
        if not member.joined.done():
            member.joined.set_result(None)
        self.streams.replica_is_up()
        self._tenants.start_sending(member)  # shares that it did not confirm, or that changed while it joined

    async def _mark_down(self, member: Member) -> None:
        """A replica is gone: its streams go on elsewhere."""
        self._take_out(member)
        client, member.client, member.load = member.client, None, None
        self._tenants.forget(member)
        assert client is not None
        if member.leaving:  # as expected; another one may have its name by now
            _log.info("%s has ended after it was removed", member)
        else:
            _log.warning("replica %r is down", member.name)
        try:
            self.streams.abandon(client)
        finally:
            await client.aclose()

    def _take_out(self, member: Member) -> None:
        """Send it nothing more."""
        if member.client is not None and self._clients.get(member.name) is member.client:
            del self._clients[member.name]
            self.generations.remove(member.name)
            self.streams.router.remove(member.name)
