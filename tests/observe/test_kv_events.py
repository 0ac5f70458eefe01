"""Events over ZeroMQ, decoded like vLLM's subscribers do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from support.cache_driver import leave
from support.event_replay import replay_events

from radixkv.cache import EventLog, PrefixCache
from radixkv.observe.kv_events import ZmqEventPublisher


class Event(msgspec.Struct, tag=True):
    """The base of vLLM's events."""


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_missed_batches_can_be_replayed(context: zmq.Context[Any], tmp_path: Path) -> None:
    log = EventLog(medium="GPU")
    cache = PrefixCache(8, 2, events=log)
    replay_endpoint = f"ipc://{tmp_path}/replay"
    with ZmqEventPublisher(f"ipc://{tmp_path}/events", replay_endpoint) as publisher:
        # The last is less than a block, for which no event is published.
        for step in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [9]):
            leave(cache, step)
            publisher.publish(log)
        cache.clear("unknown namespace")
        cache.clear("")
        cache.clear()
        publisher.publish(log)
        batches = replay_events(context, replay_endpoint, 0)
        assert [number for number, _ in batches] == [0, 1, 2]
        assert replay_events(context, replay_endpoint, 2) == batches[2:]
    decoded = [msgspec.msgpack.decode(batch, type=Batch) for _, batch in batches]
    first, second = decoded[0].events[0], decoded[1].events[0]
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.token_ids, first.parent_block_hash, first.block_size) == ([1, 2, 3, 4], None, 2)
    assert (second.token_ids, second.parent_block_hash, second.medium) == ([6, 7], first.block_hashes[-1], "GPU")
    *removed, cleared = decoded[2].events
    assert isinstance(cleared, AllBlocksCleared)
    removed_hashes = [name for event in removed if isinstance(event, BlockRemoved) for name in event.block_hashes]
    assert set(removed_hashes) >= {*first.block_hashes, *second.block_hashes}
    assert decoded[0].data_parallel_rank == 0


def test_a_replay_is_whole(context: zmq.Context[Any], tmp_path: Path) -> None:
    """There are more messages than sockets keep by default."""
    log = EventLog()
    cache = PrefixCache(8, 2, events=log)
    with ZmqEventPublisher(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay") as publisher:
        for number in range(5_000):
            leave(cache, [number, number + 1])
            publisher.publish(log)
        batches = replay_events(context, f"ipc://{tmp_path}/replay", 0)
    assert [number for number, _ in batches] == list(range(5_000))


def test_a_subscriber_receives_events(context: zmq.Context[Any], tmp_path: Path) -> None:
    log = EventLog()
    cache = PrefixCache(8, 2, events=log)
    subscriber = context.socket(zmq.SUB)
    subscriber.connect(f"ipc://{tmp_path}/events")
    subscriber.setsockopt_string(zmq.SUBSCRIBE, "kv-events")
    with ZmqEventPublisher(f"ipc://{tmp_path}/events") as publisher:
        token = 0
        while not subscriber.poll(50):  # until the subscription has reached the publisher
            token += 1
            leave(cache, [token, token])
            publisher.publish(log)
        topic, number, batch = subscriber.recv_multipart()
    assert (topic, len(number)) == (b"kv-events", 8)
    *_, event = msgspec.msgpack.decode(batch, type=Batch).events  # after removals, where it took many to reach it
    assert isinstance(event, BlockStored)
    assert event.token_ids[0] == int.from_bytes(number, "big") + 1


def test_a_closed_publisher_refuses(tmp_path: Path) -> None:
    log = EventLog()
    leave(PrefixCache(8, 2, events=log), [1, 2])
    publisher = ZmqEventPublisher(f"ipc://{tmp_path}/events")
    publisher.close()
    publisher.close()
    with pytest.raises(ValueError, match="closed"):
        publisher.publish(log)


def test_an_address_that_cannot_be_bound_is_named() -> None:
    with pytest.raises(ValueError, match=r"kv_events_endpoint: expected an address .* got nowhere"):
        ZmqEventPublisher("nowhere")
