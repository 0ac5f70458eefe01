"""A reader of a replica's records has what its cache holds; one that is too slow has to begin anew."""

from __future__ import annotations

import random

import numpy as np

from radixkv.cache import PrefixCache
from radixkv.cluster.feed import RecordFeed
from radixkv.cluster.records import Kind, RecordReader, decode_hashes, encode_held


def replay(data: bytes, chunk: int) -> set[int]:
    reader, held = RecordReader(), set[int]()
    for start in range(0, len(data), chunk):
        for kind, payload in reader.read(data[start : start + chunk]):
            if kind is Kind.STORED:
                held |= set(decode_hashes(payload))
            elif kind is Kind.REMOVED:
                held -= set(decode_hashes(payload))
            else:
                assert kind in (Kind.HELD, Kind.CLEARED)
                held.clear()
    return held


def test_records_tell_what_is_held_however_they_are_cut() -> None:
    rng = random.Random(0)
    cache = PrefixCache(40, 4)

    def run(namespace: str) -> None:
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
        table = cache.open(tokens, namespace)
        cache.reserve(table, len(tokens))
        cache.append(table, tokens[table.num_tokens :])
        cache.close(table)

    for _ in range(5):
        run("")
    feed = RecordFeed(4, lambda: None)
    cache.add_observer(feed)
    data = b"".join(encode_held(cache.block_hashes()))
    for number in range(200):
        run(rng.choice(["", "other"]))
        if number % 50 == 49:
            cache.clear(rng.choice([None, "other"]))
        data += feed.take()
        assert replay(data, 4096) == set(cache.block_hashes().tolist())
    assert replay(data, 1) == replay(data, 7) == set(cache.block_hashes().tolist())
    cache.remove_observer(feed)
    run("")
    assert feed.take() == b""


def test_a_reader_that_is_too_slow_begins_anew() -> None:
    wakes: list[None] = []
    cache = PrefixCache(40, 4)
    feed = RecordFeed(4, lambda: wakes.append(None), max_hashes=4)
    cache.add_observer(feed)
    for number in range(3):
        tokens = np.arange(100 * number, 100 * number + 16)
        table = cache.open(tokens)
        cache.reserve(table, 16)
        cache.append(table, tokens)
        cache.close(table)
    assert feed.overflowed
    assert feed.take() == b""
    assert wakes
