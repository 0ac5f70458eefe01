"""Kills processes that write to a store, and reads what they left: `python killed_writer.py FOLDER KILLS SEED`.

The processes are forks of this one, which costs milliseconds. Prints how many blocks were hit; ends with an error if one of
them was wrong, or the folder did not open.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import numpy as np

from radixkv.tiers.block_format import BlockFormat
from radixkv.tiers.block_key import BlockKey, block_keys, namespace_digest
from radixkv.tiers.disk_tier import DiskTier
from radixkv.tiers.tier import BlockBytes

FORMAT = BlockFormat(b"a model", 4, 20_000)
CAPACITY = 100 * 20_480
PREFIXES = 40
LENGTH = 8


def open_tier(folder: Path) -> DiskTier:
    return DiskTier(folder, FORMAT, capacity_bytes=CAPACITY, queue_bytes=64 * FORMAT.block_bytes)


def prefix(number: int) -> list[BlockKey]:
    """One of several prefixes, which do not all fit."""
    tokens = np.repeat(np.array([number, *range(1, LENGTH)], dtype="<i4"), FORMAT.block_size)
    return list(block_keys(namespace_digest(FORMAT.fingerprint, "ann"), tokens.tobytes(), 4 * FORMAT.block_size))


def computed(keys: list[BlockKey]) -> BlockBytes:
    """What the blocks must hold."""
    rows = np.empty((len(keys), FORMAT.block_bytes), dtype=np.uint8)
    for row, key in zip(rows, keys, strict=True):
        row[:] = np.frombuffer(
            (key.digest * (FORMAT.block_bytes // len(key.digest) + 1))[: FORMAT.block_bytes], np.uint8
        )
    return rows


def write_until_killed(folder: Path, progress: int, seed: int) -> None:
    tier = open_tier(folder)
    chance = random.Random(seed)
    while True:
        keys = prefix(chance.randrange(PREFIXES))
        tier.put_many(keys, computed(keys))
        if chance.random() < 0.05:
            tier.clear(keys[0].namespace)
        os.write(progress, b".")
        if chance.random() < 0.2:
            tier.flush()  # kills are timed by calls, and on a busy machine many come before the first write ends


def count_hits(folder: Path) -> int:
    tier = open_tier(folder)
    hits = 0
    for number in range(PREFIXES):
        keys = prefix(number)
        out = np.zeros((LENGTH, FORMAT.block_bytes), dtype=np.uint8)
        count = tier.get_many(keys, out)
        assert np.array_equal(out[:count], computed(keys)[:count]), "a wrong block was hit"
        hits += count
    tier.close()
    return hits


def main(folder: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    hits = 0
    for _ in range(kills):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            write_until_killed(folder, write, chance.randrange(1 << 30))
        os.close(write)
        wanted = chance.randrange(1, 60)
        while wanted:
            got = len(os.read(read, wanted))
            if not got:
                break  # it ended by itself
            wanted -= got
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"the writer ended by itself: {status}"
        os.close(read)
        hits += count_hits(folder)
    print(hits)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
