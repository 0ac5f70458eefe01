"""KV events of tiers: a subscriber knows what each tier holds, and takes none of it for what is in the pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.event_replay import replay_events
from support.tiered_llm import answers, evict_all, make

from radixkv.cache.block_hash import namespace_hash, next_hashes

zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")

STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"


def held(endpoint: str) -> dict[str, set[int]]:
    """What a subscriber that has read all events knows: block hashes by medium."""
    context: Any = zmq.Context()
    blocks: dict[str, set[int]] = {}
    try:
        for _, batch in replay_events(context, endpoint, 0):
            for event in msgspec.msgpack.decode(batch)[1]:
                if event["type"] == CLEARED:
                    blocks.pop("CPU", None)
                    continue
                known = blocks.setdefault(event["medium"], set())
                if event["type"] == STORED:
                    assert known.isdisjoint(event["block_hashes"])
                    check_names(event)
                    known.update(event["block_hashes"])
                elif event["medium"] == "CPU":  # those of blocks that are not full are removed, too
                    known.difference_update(event["block_hashes"])
                else:
                    assert known.issuperset(event["block_hashes"])
                    known.difference_update(event["block_hashes"])
    finally:
        context.destroy(linger=0)
    return {medium: hashes for medium, hashes in blocks.items() if hashes}


def check_names(event: dict[str, Any]) -> None:
    """The names can be computed from the tokens alone."""
    before = event["parent_block_hash"]
    tokens = b"".join(token.to_bytes(4, "little") for token in event["token_ids"])
    assert next_hashes(namespace_hash("") if before is None else before, tokens, 16) == event["block_hashes"]
    assert event["extra_keys"] == [[f"{namespace_hash(''):016x}"]] * len(event["block_hashes"])


@pytest.mark.usefixtures("loads_are_worth_it")
def test_a_subscriber_knows_what_each_tier_holds(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/replay"
    tiers = {"host_cache_size": "8KiB", "disk_cache": tmp_path / "store", "disk_cache_size": "4MiB"}
    events = {"kv_events_endpoint": f"ipc://{tmp_path}/events", "kv_events_replay_endpoint": endpoint}
    with make(**tiers, **events) as llm:
        answers(llm, [{"prompt_token_ids": [8, 9, 10, 11, 12] * 3}])  # makes room on the host for the others
        evict_all(llm)
        expected = answers(llm)
        cached = held(endpoint)
        evict_all(llm)
        llm.engine.step()  # publishes what was evicted
        tier_stats = dict(llm.engine.tiers.totals.tiers)
        below = held(endpoint)
        assert tier_stats["host"].evicted_blocks > 0
        num_on_host = tier_stats["host"].written_blocks - tier_stats["host"].evicted_blocks
        assert {medium: len(hashes) for medium, hashes in below.items()} == {
            "CPU_PINNED": num_on_host,
            "DISK": tier_stats["disk"].written_blocks,
        }
        assert below["CPU_PINNED"] < below["DISK"]
        # The same names as in the pool, so that a router knows what can be loaded.
        assert cached["CPU"] <= below["DISK"]
    endpoint = events["kv_events_replay_endpoint"] = f"ipc://{tmp_path}/second"
    events["kv_events_endpoint"] += "2"
    with make(disk_cache=tmp_path / "store", disk_cache_size="4MiB", **events) as llm:
        assert "DISK" not in held(endpoint)
        assert answers(llm) == expected
        read = held(endpoint)
        assert len(read["DISK"]) == dict(llm.engine.tiers.totals.tiers)["disk"].hit_blocks
        llm.reset_prefix_cache()
        assert held(endpoint) == {}
