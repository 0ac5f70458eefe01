"""The index of a store, damaged in one way or another: it is made anew, and the store is used."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from support.disk_tiers import BLOCKS, KEYS, OpenTier, put
from support.tier_model import FakeClock, get, prefix_keys

from radixkv.tiers.disk.slot_index import IndexedBlock, SlotIndex

PAGE = 4096


def test_an_index_is_begun_anew_whichever_of_its_pages_is_damaged(open_tier: OpenTier, tmp_path: Path) -> None:
    """Damage further inside an index that still opens used to stop all storing, after restarts too."""
    open_tier().close()
    (index,) = tmp_path.glob("store/*/index.sqlite")
    rows = SlotIndex(index.parent, writable=True)
    rows.commit([IndexedBlock(1000 + n, n.to_bytes(16), bytes(16), 1.0) for n in range(500)], [], [])
    rows.close()
    whole = index.read_bytes()
    assert len(whole) > 5 * PAGE
    for start in range(0, len(whole), PAGE):
        index.write_bytes(whole[:start] + b"\xff" * PAGE + whole[start + PAGE :])
        tier = open_tier()
        put(tier)
        assert np.array_equal(get(tier, KEYS), BLOCKS)
        assert tier.stats.dropped_blocks == 0
        tier.close()


def flip(path: Path, offset: int, bits: int = 0x80) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= bits
    path.write_bytes(content)


def age_a_page(path: Path) -> None:
    """Put back an older version of the page that finds blocks by digest."""
    for first in (0, 40):
        before = path.read_bytes()
        index = SlotIndex(path.parent, writable=True)
        index.commit([IndexedBlock(s, s.to_bytes(20), bytes(20), 1.0) for s in range(first, first + 40)], [], [])
        index.close()
    after = path.read_bytes()
    path.write_bytes(after[: 2 * PAGE] + before[2 * PAGE : 3 * PAGE] + after[3 * PAGE :])


def change(path: Path, *statements: str) -> None:
    database = sqlite3.connect(path)
    for statement in statements:
        database.execute(statement)
    database.commit()
    database.close()


@pytest.mark.parametrize(
    "damage",
    [
        age_a_page,
        lambda path: flip(path, path.read_bytes().index(b"sqlite_autoindex_blocks_1")),
        lambda path: flip(path, path.read_bytes().index(b"slot INTEGER")),
        lambda path: flip(path, path.read_bytes().index(b"namespace BLOB"), 1),
        lambda path: flip(path, path.read_bytes().index(b"family BLOB"), 1),
        lambda path: flip(path, path.read_bytes().index(b"PRIMARY KEY"), 1),
        lambda path: flip(path, 18),
        lambda path: flip(path, 47),
        lambda path: change(path, "UPDATE blocks SET digest = CAST(x'ff' AS TEXT) WHERE slot = 3"),
        lambda path: change(path, "UPDATE blocks SET slot = -1 WHERE slot = 3"),
        lambda path: change(path, "CREATE TABLE other AS SELECT NULL AS slot, digest, namespace, used FROM blocks",
                            "DROP TABLE blocks", "ALTER TABLE other RENAME TO blocks"),
    ],
    ids=["old page", "name of an index", "name of a column", "another column", "column of pins", "key", "who may write",
         "format of the schema", "text", "negative slot", "no slot"],
)  # fmt: skip
def test_a_store_is_used_again_at_once_whatever_is_damaged(
    open_tier: OpenTier, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """At each start, some indexes were opened that could never be written; others kept the engine from starting."""
    tier = open_tier()
    put(tier)
    tier.close()
    (index,) = tmp_path.glob("store/*/index.sqlite")
    damage(index)
    reader = open_tier(read_only=True)
    found = get(reader, KEYS)
    assert np.array_equal(found, BLOCKS[: len(found)])
    reader.close()
    for _ in range(2):
        tier = open_tier()
        put(tier)
        assert np.array_equal(get(tier, KEYS), BLOCKS)
        assert tier.stats.dropped_blocks == tier.stats.errors == 0
        tier.close()


def test_an_index_that_turns_out_damaged_when_it_is_written_is_begun_anew(
    open_tier: OpenTier, tmp_path: Path, clock: FakeClock
) -> None:
    """Nothing used to be stored any more until a restart."""
    tier = open_tier()
    put(tier)
    (index,) = tmp_path.glob("store/*/index.sqlite")
    index.write_bytes(b"nonsense" * 1000)
    error = sqlite3.DatabaseError("database disk image is malformed")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    other = prefix_keys("bob", 1)
    with mock.patch.object(SlotIndex, "commit", side_effect=error):
        put(tier, other, BLOCKS[:1])
    clock.now += 1
    put(tier, other, BLOCKS[:1])
    assert np.array_equal(get(tier, other), BLOCKS[:1])
    assert tier.stats.errors == 1
    tier.close()
    assert open_tier().contains_prefix(other) == 1
