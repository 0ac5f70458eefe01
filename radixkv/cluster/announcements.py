"""What a replica announces to each ingress that reads its events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from functools import partial

import numpy as np
from numpy.typing import NDArray

from radixkv.async_llm import AsyncLLM
from radixkv.cluster.announced_requests import AnnouncedRequests
from radixkv.cluster.counters import counters_of
from radixkv.cluster.feed import RecordFeed
from radixkv.cluster.load import ReplicaLoad
from radixkv.cluster.records import encode_held, encode_load
from radixkv.engine.engine import Engine
from radixkv.engine.stats import SUMMED_GAUGES
from radixkv.errors import EngineDeadError
from radixkv.threads import call_in_loop

# Between two looks at the replica's load, which changes with every step.
_SECONDS_BETWEEN_LOADS = 0.2
# Even if nothing changes, a load is sent this often: a reader that receives nothing for longer takes the replica to be gone.
_LOADS_PER_HEARTBEAT = 5


class Announcements:
    """The readers of one replica's events.

    Args:
        llm: the replica's.

    Attributes:
        requests: what the replica is asked for; see `AnnouncedRequests.add`.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._wakers: set[asyncio.Event] = set()
        self._removals: set[asyncio.Task[None]] = set()
        self.requests = AnnouncedRequests()

    def announce(self) -> None:
        """Send every reader at once what has changed."""
        for waker in self._wakers:
            waker.set()

    async def subscribe(self, reader: int) -> AsyncGenerator[bytes, None]:
        """The records for one reader: the present state, then each change but those by requests that it sends itself.

        They end when the reader is too slow, or the engine has died or finished draining.
        """
        llm, awake = self._llm, asyncio.Event()
        wake = partial(call_in_loop, asyncio.get_running_loop(), awake.set)
        begun: list[RecordFeed] = []

        def begin(engine: Engine) -> NDArray[np.uint64]:
            feed = RecordFeed(engine.cache.block_size, wake)
            engine.cache.add_observer(feed)
            begun.append(feed)
            return engine.cache.block_hashes()

        beginning = asyncio.ensure_future(llm.call(begin))
        self._wakers.add(awake)
        try:
            # A step may take longer than a reader waits for a silent replica.
            while not (await asyncio.wait([beginning], timeout=_SECONDS_BETWEEN_LOADS * _LOADS_PER_HEARTBEAT))[0]:
                yield encode_load(_load(llm))
            try:
                held = await beginning
            except EngineDeadError:
                return
            (feed,) = begun
            unfinished = self.requests.join(feed, reader)
            for record in encode_held(held):
                yield record
            for record in unfinished:
                yield record
                await asyncio.sleep(0)  # hashing a long prompt takes milliseconds
            async with aclosing(self._changes(feed, awake)) as changes:
                async for record in changes:
                    yield record
        finally:
            beginning.cancel()
            self._wakers.discard(awake)
            for each in begun:
                self.requests.leave(each)
            # A task of its own: this one may be cancelled.
            removal = asyncio.ensure_future(self._forget(begun))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)

    async def _changes(self, feed: RecordFeed, awake: asyncio.Event) -> AsyncGenerator[bytes, None]:
        """The loads, and what has come and gone, until nothing more will follow; the feed sets ``awake``."""
        llm, loop = self._llm, asyncio.get_running_loop()
        sent: ReplicaLoad | None = None
        silent, next_look = 0, loop.time()
        while llm.death is None and not feed.overflowed:
            is_last = llm.draining and not llm.num_unfinished  # before the load, whose sending may take long
            if llm.draining or loop.time() >= next_look:  # its last counts must not be missed
                next_look = loop.time() + _SECONDS_BETWEEN_LOADS
                load = _load(llm)
                silent += 1
                if load != sent or silent >= _LOADS_PER_HEARTBEAT:
                    sent, silent = load, 0
                    yield encode_load(load)
            if is_last:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(awake.wait(), next_look - loop.time())
            awake.clear()
            records = feed.take()
            if records:
                yield records

    async def _forget(self, begun: list[RecordFeed]) -> None:
        """Remove feeds. Calls run in order: even if the reader left before its feed began, it has begun when this runs."""

        def end(engine: Engine) -> None:
            for feed in begun:
                engine.cache.remove_observer(feed)

        with suppress(EngineDeadError):
            await self._llm.call(end)


def _load(llm: AsyncLLM) -> ReplicaLoad:
    stats = llm.stats
    return ReplicaLoad(
        draining=llm.draining,
        **{name: getattr(stats, name) for name in SUMMED_GAUGES},
        prefill_seconds_per_token=stats.prefill_seconds_per_token,
        counters=counters_of(stats),
    )
