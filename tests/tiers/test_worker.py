"""Threads that write let threads that compute go first."""

from __future__ import annotations

import os

from support.tier_model import FORMAT, prefix_keys, random_blocks

from radixkv.tiers.background_writer import BackgroundWriter
from radixkv.tiers.worker import Worker


def niceness() -> int:
    """Of the thread that asks."""
    return os.getpriority(os.PRIO_PROCESS, 0)


def test_who_writes_gives_way_and_nobody_else() -> None:
    own = niceness()
    seen: list[int] = []
    for worker in (Worker("loads"), Worker("writes", gives_way=True)):
        worker.submit(lambda: seen.append(niceness()))
        assert worker.stop(600)
    writer = BackgroundWriter("writes", FORMAT.block_bytes, 1 << 20, lambda batch: seen.append(niceness()))
    assert writer.put(prefix_keys("ann", 1), random_blocks(0, 1), [0]) == 0
    writer.close()
    assert seen == [own, min(own + 10, 19), min(own + 10, 19)]
    assert niceness() == own
