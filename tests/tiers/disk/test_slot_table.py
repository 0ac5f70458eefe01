"""Which slot holds which block, in memory and in the index."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from support.disk_tiers import KEYS

from radixkv.tiers.disk.slot_index import IndexedBlock, SlotIndex
from radixkv.tiers.disk.slot_table import SlotTable
from radixkv.tiers.record import Verdict


def test_what_was_used_and_freed_in_one_store_is_not_in_another() -> None:
    table = SlotTable()
    for slot, key in enumerate(KEYS):
        table.add([key], [IndexedBlock(slot, key.digest, key.namespace, 1.0)])
    table.mark_used(KEYS)
    table.clear(None)
    table.fill({})
    assert (table.take_used(), table.take_freed()) == ([], [])


def test_a_block_that_was_written_again_is_not_forgotten_for_the_slot_that_it_had() -> None:
    table, key = SlotTable(), KEYS[0]
    table.add([key], [IndexedBlock(0, key.digest, key.namespace, 1.0)])
    found = table.find([key])
    table.add([key], [IndexedBlock(1, key.digest, key.namespace, 2.0)])
    assert table.note_verdicts(found, [Verdict.OTHER], 0) == 0
    assert len(table.find([key])) == 1


def test_a_transaction_that_fails_changes_nothing_and_hinders_no_other(tmp_path: Path) -> None:
    index, block = SlotIndex(tmp_path, writable=True), IndexedBlock(0, bytes(20), bytes(20), 1.0)
    with pytest.raises(sqlite3.IntegrityError):
        index.commit([block, block._replace(slot=1, digest=None)], [], [])  # type: ignore[arg-type]
    assert index.all() == []
    index.commit([block], [], [])
    assert index.all() == [block]
    index.close()
