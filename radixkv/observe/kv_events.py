"""KV events over ZeroMQ, in the format of vLLM's subscribers (routers such as Dynamo's and llm-d's).

::

    PUB      [topic, sequence number (8 bytes, big-endian), batch]
    ROUTER   replay: a subscriber sends a sequence number, and gets every buffered batch from that one on, then the
             number -1 with an empty batch

A batch is msgpack: ``[seconds since 1970, [event, ...], data-parallel rank]``. Events are maps with a ``type``, as from vLLM
0.24 on. Only full blocks are published, as routers expect.

Needs pyzmq and msgspec: ``pip install 'radixkv[events]'``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import msgspec
import zmq

from radixkv.cache import AllCleared, BlocksRemoved, BlocksStored, CacheEvent
from radixkv.threads import WorkerThread

_TOPIC = b"kv-events"
_DATA_PARALLEL_RANK = 0
# Most batches that can be replayed.
_MAX_KEPT_BATCHES = 10_000
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class ZmqEventPublisher:
    """Publishes batches of events, and replays batches that subscribers missed.

    A thread of its own owns the sockets, so that `publish` never blocks on a subscriber.

    Args:
        endpoint: bound for publishing, such as ``tcp://*:5557``.
        replay_endpoint: bound for replay requests; None: no replay.

    Raises:
        ValueError: an endpoint cannot be bound; the message names it.
    """

    def __init__(self, endpoint: str, replay_endpoint: str | None = None) -> None:
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=_MAX_KEPT_BATCHES if replay_endpoint else 0)
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        # No limit, so that replays are complete: by default, messages beyond a thousand unread ones would be dropped.
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._lock = threading.Lock()  # of the outbox: sockets belong to one thread at a time
        try:
            self._pub.bind(endpoint)
            if replay_endpoint is not None:
                self._router.bind(replay_endpoint)
            self._inbox.bind("inproc://batches")
            self._outbox.connect("inproc://batches")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            given = " and ".join(filter(None, (endpoint, replay_endpoint)))
            raise ValueError(
                f"kv_events_endpoint: expected an address to listen on, such as tcp://*:5557, got {given} ({error})"
            ) from error
        self._closed = False
        self._thread = WorkerThread(self._serve, "kv-events")
        self._thread.start()

    def publish(self, events: Iterable[CacheEvent]) -> None:
        """Send the events of one step as a batch; no batch is sent without events.

        Raises:
            ValueError: the publisher is closed.
        """
        encoded = [event for event in map(_encoded, events) if event is not None]
        if not encoded:
            return
        batch = msgspec.msgpack.encode([time.time(), encoded, _DATA_PARALLEL_RANK])
        with self._lock:
            if self._closed:
                raise ValueError("the publisher is closed")
            self._outbox.send(batch)

    def close(self) -> None:
        """Send the remaining batches, and release the endpoints."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._outbox.send(b"")
        self._thread.join()
        self._context.destroy(linger=1000)

    def __enter__(self) -> ZmqEventPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        number = 0
        while True:
            ready = dict(poller.poll())
            # A replay includes all batches that were published before its request.
            while self._inbox.poll(0):
                batch = self._inbox.recv()
                if not batch:
                    return
                sequence = number.to_bytes(8, "big")
                number += 1
                self._kept.append((sequence, batch))
                self._pub.send_multipart([_TOPIC, sequence, batch])
            if self._router in ready:
                self._replay(self._router.recv_multipart())

    def _replay(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            return  # malformed request
        client, start = frames[0], frames[2]
        for sequence, batch in self._kept:
            # Big-endian numbers of equal length compare like their bytes.
            if sequence >= start:
                self._router.send_multipart([client, b"", sequence, batch])
        self._router.send_multipart([client, b"", _END_OF_REPLAY, b""])


def _encoded(event: CacheEvent) -> dict[str, Any] | None:
    """An event as subscribers get it; None where it has no full block."""
    if isinstance(event, AllCleared):
        return {"type": "AllBlocksCleared"}
    if isinstance(event, BlocksRemoved):
        return {"type": "BlockRemoved", "block_hashes": list(event.block_hashes), "medium": event.medium}
    assert isinstance(event, BlocksStored)
    num_whole = len(event.token_ids) // event.block_size
    if not num_whole:
        return None
    salt = f"{event.namespace_hash:016x}"
    return {
        "type": "BlockStored",
        "block_hashes": list(event.block_hashes[:num_whole]),
        "parent_block_hash": event.parent_hash,
        "token_ids": list(event.token_ids[: num_whole * event.block_size]),
        "block_size": event.block_size,
        "lora_id": None,
        "medium": event.medium,
        "lora_name": None,
        "extra_keys": [[salt]] * num_whole,
    }
