"""The store on a disk: what is never hit, and what no other user can read."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.disk_tiers import BLOCKS, KEYS, SLOT, OpenTier, index_of, put, slot_file
from support.tier_model import BLOCK_SIZE, FORMAT, get, prefix_keys

from radixkv.tiers.block_format import BlockFormat
from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.disk.namespace_secret import namespace_secret
from radixkv.tiers.disk.store_folder import make_store_folder
from radixkv.tiers.record import RecordCodec


@pytest.mark.parametrize("key", [None, bytes(range(32))], ids=["plain", "sealed"])
@pytest.mark.parametrize("where", ["magic", "checksum", "digest", "tokens", "first byte", "last byte"])
def test_a_flipped_bit_is_a_miss_with_a_count(
    open_tier: OpenTier, tmp_path: Path, where: str, key: bytes | None
) -> None:
    if key and where in ("magic", "checksum", "tokens"):
        pytest.skip("the tag covers what matters; `radixkv store verify` reads the checksum")
    tier = open_tier(key=key, capacity_bytes=7 * SLOT)
    put(tier)
    body = SLOT - FORMAT.block_bytes - (16 if key else 0)
    offset = {"magic": 0, "checksum": 8, "digest": 24, "tokens": 56, "first byte": body, "last byte": SLOT - 1}[where]
    with slot_file(tmp_path).open("r+b") as file:
        file.seek(2 * SLOT + offset)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    assert np.array_equal(get(tier, KEYS), BLOCKS[:2])
    assert tier.stats.corrupt_blocks == 1
    assert tier.contains_prefix(KEYS) == 2
    put(tier)
    put(tier, prefix_keys("bob", 1), BLOCKS[:1])  # into the slot of the damaged one
    assert len(tier) == 7
    assert np.array_equal(get(tier, KEYS), BLOCKS)
    tier.close()
    assert np.array_equal(get(open_tier(key=key), KEYS), BLOCKS)


@pytest.mark.parametrize("then", ["cleared", "freed and cleared", "closed"])
def test_a_record_that_proved_wrong_is_overwritten(open_tier: OpenTier, tmp_path: Path, then: str) -> None:
    """A damaged record still holds what can be turned back into text, and was not overwritten when its tenant was cleared."""
    tier = open_tier()
    put(tier)
    with slot_file(tmp_path).open("r+b") as file:
        file.seek(2 * SLOT)
        file.write(b"\0")  # in the header: the block behind it is whole
    assert len(get(tier, KEYS)) == 2
    if then == "freed and cleared":
        put(tier, prefix_keys("bob", 1), BLOCKS[:1] ^ 255)  # the slot is free by the index
    if then == "closed":
        tier.close()
    else:
        tier.clear(KEYS[0].namespace)
    assert tier.flush(600)
    assert BLOCKS[2].tobytes() not in slot_file(tmp_path).read_bytes()


def test_tokens_are_compared_even_where_digests_collide(open_tier: OpenTier) -> None:
    for key in (None, bytes(32)):
        tier = open_tier(key=key)
        put(tier)
        forged = BlockKey(KEYS[0].namespace, KEYS[0].digest, bytes(range(4 * BLOCK_SIZE)))
        assert len(get(tier, [forged])) == 0
        tier.close()


def test_a_slot_that_an_old_index_gives_to_another_block_is_a_miss(open_tier: OpenTier, tmp_path: Path) -> None:
    tier = open_tier()
    put(tier)
    tier.close()
    index = index_of(tmp_path)
    rows = index.all()
    index.commit([], [], [row.slot for row in rows])
    index.commit([row._replace(slot=(row.slot + 1) % 6) for row in rows], [], [])
    index.close()
    tier = open_tier()
    assert tier.contains_prefix(KEYS) == 6
    assert len(get(tier, KEYS)) == 0
    assert tier.stats.corrupt_blocks == 0


@pytest.mark.parametrize(
    "other",
    [
        BlockFormat(b"another model, dtype or quantisation", BLOCK_SIZE, FORMAT.block_bytes),
        BlockFormat(FORMAT.fingerprint, BLOCK_SIZE, FORMAT.block_bytes + 1),
    ],
    ids=["fingerprint", "bytes"],
)
def test_another_format_in_the_same_folder_is_never_hit(open_tier: OpenTier, other: BlockFormat) -> None:
    put(open_tier())
    tier = open_tier(other)
    assert tier.contains_prefix(KEYS) == 0
    assert get(tier, KEYS, other.block_bytes).shape[0] == 0


def test_a_format_of_another_version_is_never_hit(open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch) -> None:
    put(open_tier())
    monkeypatch.setattr("radixkv.tiers.block_format.FORMAT_VERSION", 99)
    assert open_tier().contains_prefix(KEYS) == 0


def test_another_encryption_key_finds_nothing_and_no_key_neither(open_tier: OpenTier) -> None:
    put(open_tier(key=bytes(32)))
    assert open_tier(key=bytes([1] * 32)).contains_prefix(KEYS) == 0
    assert open_tier().contains_prefix(KEYS) == 0


def test_an_encrypted_store_holds_neither_blocks_nor_tokens(open_tier: OpenTier, tmp_path: Path) -> None:
    tier = open_tier(key=bytes(32))
    keys = prefix_keys("ann", 11, 12)
    put(tier, keys, BLOCKS[:2])
    tier.close()
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert BLOCKS[0].tobytes()[:16] not in written
    assert keys[0].tokens not in written


def test_files_are_their_owners_alone(open_tier: OpenTier, tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        tier = open_tier()
        put(tier)
        modes = {
            path: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "store", *tmp_path.rglob("store/**/*")]
        }
    finally:
        os.umask(mask)
    assert len(modes) >= 6
    assert set(modes.values()) == {0o600, 0o700}
    assert {path for path, mode in modes.items() if mode == 0o700} == {p for p in modes if p.is_dir()}
    tier.close()
    (folder,) = tmp_path.glob("store/*")
    folder.chmod(0o755)
    open_tier()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("namespaces.secret", namespace_secret),
        ("format.json", lambda root: make_store_folder(root, RecordCodec(FORMAT, None))),
    ],
)
def test_a_file_without_which_nothing_is_found_is_on_the_disk_before_its_name_is(
    tmp_path: Path, name: str, make: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power cut can leave an empty secret, which is refused at every start."""
    synced = list[tuple[bool, bool]]()

    def sync(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        synced.append((is_folder, any(tmp_path.rglob(name))))

    monkeypatch.setattr(os, "fsync", sync)
    make(tmp_path)
    make(tmp_path)
    assert synced == [(False, False), (True, True)]
