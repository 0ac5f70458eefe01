"""A replica that is silent is down, but not one that an ingress could not listen to because its event loop stood still."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.pretended_replicas import until
from support.replica_servers import SECRET, local_replicas, tiny_llm
from support.stalled_loop import stalling

from radixkv.cluster import ReplicaSet
from radixkv.cluster.idle_timeout import idle_timeout


async def turn() -> None:
    """Let the loop run all that is due."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_time_in_which_the_loop_stands_still_counts_as_one_tick() -> None:
    stall = stalling(asyncio.get_running_loop())
    num_ticks = 0
    with pytest.raises(TimeoutError):
        async with idle_timeout(1000.0) as restart:
            stall(5000.0)
            await turn()
            for _ in range(8):
                stall(100.0)
                await turn()
            restart()
            while True:
                num_ticks += 1
                stall(100.0)
                await turn()
    assert num_ticks == 10


async def test_a_replica_is_not_down_because_the_ingress_stood_still(
    default_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each stall of more than ten seconds put all replicas down, and moved all streams."""
    async with local_replicas(tmp_path, tiny_llm(default_tokenizer)) as (_, (server,)):
        replicas = ReplicaSet(SECRET)
        with monkeypatch.context() as patch:
            patch.setattr("radixkv.cluster.replica_set._SECONDS_OF_SILENCE", 10.0)
            await replicas.add("0", server.url)
            load = replicas.loads["0"]
            stalling(asyncio.get_running_loop())(60.0)
            await until(lambda: replicas.loads.get("0", load) is not load)
        await replicas.close()
    assert "is down" not in caplog.text
