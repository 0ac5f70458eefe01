"""Blobs in a real server: it refuses some, hangs, dies and comes back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.disk_tiers import BLOCKS, KEYS, put
from support.key_value_server import EXECUTABLE, KeyValueServer
from support.tier_model import FORMAT, FakeClock, get

from radixkv.tiers import redis_blobs
from radixkv.tiers.redis_blobs import RedisBlobs
from radixkv.tiers.shared_tier import PartlyWrittenError, SharedTier


def test_of_a_batch_that_a_server_took_in_part_each_block_is_counted_as_what_it_is(server: KeyValueServer) -> None:
    store = RedisBlobs(server.url, timeout=600)
    rules = ["resetkeys", "%R~*", "~radixkv/format/*"]
    store._client.execute_command("ACL", "SETUSER", "default", *rules)
    try:
        with pytest.raises(PartlyWrittenError, match="NoPermissionError") as raised:
            store.write({"format/a": b"1", "other/b": b"2", "format/c": b"3", "other/d": b"4", "other/e": b"5"})
        assert (raised.value.num_written, raised.value.num_lost) == (2, 3)
        assert store.read(["format/a", "other/b", "format/c"]) == [b"1", None, b"3"]
    finally:
        store._client.execute_command("ACL", "SETUSER", "default", "allkeys")
        store.close()


def test_what_is_marked_as_used_is_used_on_the_server(server: KeyValueServer) -> None:
    store = RedisBlobs(server.url)
    store.write({"format/a": b"1", "format/b": b"2"})
    before = store._client.info("stats")["keyspace_hits"]
    store.mark_used(["format/a", "format/b", "format/none"])
    assert store._client.info("stats")["keyspace_hits"] == before + 2
    store.close()


def test_of_many_blobs_all_below_a_path_are_cleared(server: KeyValueServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server names them in parts."""
    monkeypatch.setattr(redis_blobs, "_NAMES_PER_SCAN", 1)
    store = RedisBlobs(server.url, timeout=600)
    names = [f"{path}/{number}" for path in ("format/ann", "format/anna") for number in range(20)]
    assert store.write(dict.fromkeys(names, b"1")) == 40
    store.clear("format/ann")
    assert [blob is None for blob in store.read(names)] == [True] * 20 + [False] * 20
    store.clear("format")
    assert store.first_present(names) is None
    store.close()


def test_a_server_that_hangs_is_not_waited_for(server: KeyValueServer) -> None:
    tier = SharedTier(RedisBlobs(server.url, timeout=0.05), FORMAT, clock=FakeClock())
    server.pause()
    try:
        assert tier.contains_prefix(KEYS) == 0
        assert len(get(tier, KEYS)) == 0
        assert tier.stats.errors == 1
    finally:
        server.resume()
        tier.close()


def test_a_server_that_dies_and_comes_back_is_used_again() -> None:
    if EXECUTABLE is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    server = KeyValueServer()
    clock = FakeClock()
    tier = SharedTier(RedisBlobs(server.url, timeout=600), FORMAT, clock=clock)
    put(tier)
    server.kill()
    assert len(get(tier, KEYS)) == 0
    put(tier)
    assert tier.stats.errors == 2  # a read and a write
    server.start()
    clock.now += 60
    put(tier)
    assert np.array_equal(get(tier, KEYS), BLOCKS)
    tier.close()
    server.kill()


def test_a_server_that_is_down_at_the_start_is_none(tmp_path: Path) -> None:
    tier = SharedTier(RedisBlobs(f"unix://{tmp_path}/nobody"), FORMAT)
    put(tier)
    assert tier.contains_prefix(KEYS) == 0
    assert tier.stats.dropped_blocks == 6
    tier.close()


def test_a_servers_password_is_not_shown() -> None:
    assert RedisBlobs("redis://ann:secret@host:6379/1").description == "redis://host:6379/1"
