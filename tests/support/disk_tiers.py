"""A disk tier's folder in tests: what is put there, and by which names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.tier_model import FORMAT, prefix_keys, random_blocks

from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.disk.slot_index import SlotIndex
from radixkv.tiers.disk.stored_pins import StoredPin
from radixkv.tiers.disk_tier import DiskTier
from radixkv.tiers.shared_tier import SharedTier

KEYS = prefix_keys("ann", *range(6))
BOB = prefix_keys("bob", *range(3))
BLOCKS = random_blocks(0, 6)
SLOT = 4096

OpenTier = Callable[..., DiskTier]


def tier_in(root: Path, key: bytes | None = None) -> DiskTier:
    """A tier with room for many blocks, to be closed by who opens it."""
    return DiskTier(root, FORMAT, capacity_bytes=64 * SLOT, queue_bytes=1 << 20, key=key)


def put(tier: DiskTier | SharedTier, keys: list[BlockKey] = KEYS, blocks: Any = BLOCKS) -> None:
    """Put blocks and wait until they are written or dropped."""
    tier.put_many(keys, blocks)
    assert tier.flush(600)


def unmount(tmp_path: Path) -> None:
    """Take the disk with the store away: whoever opens the folder now begins another store, at the mount point."""
    (tmp_path / "store").rename(tmp_path / "unmounted")


def mount(tmp_path: Path) -> None:
    """Bring the disk back, into the place of what was written at its mount point meanwhile."""
    (tmp_path / "store").rename(tmp_path / "mount point")
    (tmp_path / "unmounted").rename(tmp_path / "store")


def pin_of(key: BlockKey) -> StoredPin:
    """The administrator's pin of one block, without an end."""
    return StoredPin(key.digest.hex(), key.namespace, key.namespace, key.tokens, None, False)


def index_of(tmp_path: Path) -> SlotIndex:
    """The index of the one folder, which no tier has open."""
    (folder,) = tmp_path.glob("store/*")
    return SlotIndex(folder, writable=True)


def slot_file(tmp_path: Path) -> Path:
    """The one file with slots."""
    (path,) = tmp_path.glob("store/*/blocks-00000")
    return path


def files_open_in(folder: Path) -> list[str]:
    """The paths below a folder that this process has open."""
    paths = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # of the listing itself
            continue
    return [path for path in paths if path.startswith(f"{folder}/")]


def bytes_of_blocks_in(folder: Path) -> int:
    """How many of `BLOCKS` are somewhere in the files with slots."""
    stored = b"".join(path.read_bytes() for path in folder.glob("store/*/blocks-*"))
    return sum(block.tobytes() in stored for block in BLOCKS)
