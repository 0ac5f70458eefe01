"""What a disk tier remembers of pins, whatever happens to its disk."""

from __future__ import annotations

import errno
import shutil
import sqlite3
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from support.disk_tiers import OpenTier, index_of, mount, put, unmount
from support.tier_model import BLOCK_SIZE, FORMAT, FakeClock

from radixkv.tiers.block_key import namespace_digest
from radixkv.tiers.disk import stored_pins
from radixkv.tiers.disk.slot_files import SlotFiles
from radixkv.tiers.disk.slot_index import IndexedPin, SlotIndex
from radixkv.tiers.disk.store_writer import StoreWriter
from radixkv.tiers.disk.stored_pins import StoredPin, StoredPins
from radixkv.tiers.record import RecordCodec

ANN, BEN = (namespace_digest(b"", name) for name in ("ann", "ben"))
TOKENS = b"in words" * BLOCK_SIZE
LATER = 4e12  # seconds since 1970


def pin(name: str, group: bytes = ANN, expires_at: float | None = LATER, by_tenant: bool = False) -> StoredPin:
    return StoredPin(name, group, group, TOKENS, expires_at, by_tenant)


def names_in_index(tmp_path: Path) -> list[str]:
    """Of the pins in the one store, which no tier has open."""
    index = index_of(tmp_path)
    names = [row.name for row in index.pins()]
    index.close()
    return names


def test_a_pin_in_a_log_shows_no_prompt() -> None:
    assert "in words" not in repr(pin("one"))


@pytest.mark.parametrize("key", [None, bytes(range(32))])
def test_pins_are_there_again_until_they_expire(open_tier: OpenTier, tmp_path: Path, key: bytes | None) -> None:
    tier = open_tier(key=key)
    kept = [pin("one"), pin("two", BEN, None), pin("three", by_tenant=True)]
    for each in [*kept, pin("over", expires_at=1.0), pin("released")]:
        tier.pins.add(each)
    tier.pins.remove("released")
    assert tier.pins.waiting() == []  # they are in force
    tier.close()
    files = b"".join(path.read_bytes() for path in tmp_path.glob("store/*/index.sqlite*"))
    assert (TOKENS in files) == (key is None)
    tier = open_tier(key=key)
    assert tier.pins.waiting() == kept
    assert tier.pins.waiting(BEN) == kept[1:2]
    tier.pins.comes_into_force("one")
    assert tier.pins.waiting(ANN) == kept[2:]
    tier.close()
    assert open_tier(key=key).pins.waiting() == kept


def test_a_pin_whose_time_ends_while_it_waits_is_forgotten(
    open_tier: OpenTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier()
    for each in (pin("over"), pin("kept", expires_at=None)):
        tier.pins.add(each)
    tier.close()
    tier = open_tier()
    assert len(tier.pins.waiting()) == 2
    monkeypatch.setattr(stored_pins, "time", SimpleNamespace(time=lambda: LATER))
    assert [each.name for each in tier.pins.waiting()] == ["kept"]
    tier.close()
    assert names_in_index(tmp_path) == ["kept"]


@pytest.mark.parametrize("cleared", [False, True])
def test_of_a_pin_that_is_gone_nothing_is_left_in_the_index_and_its_log(
    open_tier: OpenTier, tmp_path: Path, cleared: bool
) -> None:
    tier = open_tier()
    for name in ("one", "other"):
        tier.pins.add(replace(pin(name, BEN), tokens=name.encode() * 4 * BLOCK_SIZE))
        assert tier.flush(600)

    def is_found(name: str) -> bool:
        return any(name.encode() * 4 in path.read_bytes() for path in tmp_path.glob("store/*/index.sqlite*"))

    assert is_found("one")
    if cleared:
        tier.clear(BEN)
    else:
        tier.pins.remove("one")
    assert tier.flush(600)
    assert not is_found("one")
    assert is_found("other") != cleared


def test_pins_are_gone_from_the_index_when_they_are_cleared(
    open_tier: OpenTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much the thread that writes has to do before."""
    tier = open_tier()
    tier.pins.add(pin("one"))
    assert tier.flush(600)
    monkeypatch.setattr(StoreWriter, "_tidy", lambda writer: None)
    tier.clear(ANN)
    index = index_of(tmp_path)
    assert index.pins() == []
    index.close()


def test_changes_of_pins_that_a_disk_refused_are_written_later(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier()
    for name in ("old", "kept"):
        tier.pins.add(pin(name, BEN if name == "old" else ANN))
    assert tier.flush(600)
    change, clear = SlotIndex.change_pins, SlotIndex.clear
    monkeypatch.setattr(SlotIndex, "change_pins", full)
    monkeypatch.setattr(SlotIndex, "clear", full)
    tier.pins.add(pin("new"))
    assert tier.flush(600)
    tier.clear(BEN)
    assert tier.stats.errors >= 2
    monkeypatch.setattr(SlotIndex, "change_pins", change)
    monkeypatch.setattr(SlotIndex, "clear", clear)
    tier.close()
    assert [each.name for each in open_tier().pins.waiting()] == ["kept", "new"]


@pytest.mark.parametrize("waits", [False, True], ids=["when the disk may be used", "when it is left alone"])
def test_pins_that_change_after_a_disk_failed_are_written(open_tier: OpenTier, clock: FakeClock, waits: bool) -> None:
    """Unless blocks were written after that, they were forgotten, even by a process that was closed in order."""
    tier = open_tier()
    tier.pins.add(pin("old"))
    with mock.patch.object(SlotFiles, "write", side_effect=OSError(errno.EIO, "unwritable")):
        put(tier)
    assert tier.stats.errors == 1
    clock.now += 0 if waits else 60
    tier.pins.remove("old")
    tier.pins.add(pin("new"))
    assert tier.flush(600)
    assert tier.pins.has_unwritten == waits
    tier.close()
    assert open_tier().pins.waiting() == [pin("new")]


def test_what_is_pinned_while_a_store_cannot_be_opened_is_written_at_the_end(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    (tmp_path / "store").write_text("no folder")
    tier = open_tier()
    tier.pins.add(pin("new"))
    assert tier.flush(600)
    (tmp_path / "store").unlink()
    tier.close()
    assert open_tier().pins.waiting() == [pin("new")]


def test_what_is_pinned_after_a_clearing_that_waits_stays_pinned(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written just before the clearing's turn at the index came, and was deleted with what had been pinned before."""
    tier = open_tier()
    tier.pins.add(pin("old"))
    assert tier.flush(600)
    commit, clear = StoredPins.commit, StoredPins.clear
    cleared = threading.Event()
    clearing = threading.Thread(target=tier.clear, args=(ANN,))

    def note_cleared(pins: StoredPins, group: bytes | None) -> None:
        clear(pins, group)
        cleared.set()

    def commit_later(pins: StoredPins, index: SlotIndex) -> None:
        if not cleared.is_set():
            clearing.start()
            assert cleared.wait(600)
            pins.add(pin("new"))
        commit(pins, index)

    monkeypatch.setattr(StoredPins, "clear", note_cleared)
    monkeypatch.setattr(StoredPins, "commit", commit_later)
    tier.pins.add(pin("older"))
    assert tier.flush(600)
    clearing.join()
    tier.close()
    assert open_tier().pins.waiting() == [pin("new")]


@pytest.mark.parametrize("pinned", ["before", "afterwards", "in an earlier process"])
def test_pins_are_written_into_a_folder_that_was_emptied(open_tier: OpenTier, tmp_path: Path, pinned: str) -> None:
    """They stayed in the deleted index."""
    tier = open_tier()
    if pinned != "afterwards":
        tier.pins.add(pin("kept"))
        assert tier.flush(600)
    if pinned == "in an earlier process":
        tier.close()
        tier = open_tier()
    shutil.rmtree(tmp_path / "store")
    if pinned == "afterwards":
        tier.pins.add(pin("kept"))
    tier.close()
    assert open_tier().pins.waiting() == [pin("kept")]


@pytest.mark.parametrize("waits", [False, True], ids=["in force", "waiting"])
@pytest.mark.parametrize("is_cleared", [False, True], ids=["removed", "cleared"])
def test_what_is_no_pin_any_more_is_not_written_into_a_folder_that_was_emptied(
    open_tier: OpenTier, tmp_path: Path, waits: bool, is_cleared: bool
) -> None:
    tier = open_tier()
    for each in (pin("gone"), pin("kept", BEN)):
        tier.pins.add(each)
    if waits:
        tier.close()
        tier = open_tier()
        tier.pins.comes_into_force("kept")
    if is_cleared:
        tier.clear(ANN)
    else:
        assert tier.pins.remove("gone") == waits
    assert tier.flush(600)
    shutil.rmtree(tmp_path / "store")
    tier.close()
    assert open_tier().pins.waiting() == [pin("kept", BEN)]


def test_pins_of_a_disk_that_came_into_place_wait(open_tier: OpenTier, tmp_path: Path) -> None:
    """Only those of the first folder that a process opened were ever seen."""
    tier = open_tier()
    tier.pins.add(pin("on the disk"))
    tier.close()
    unmount(tmp_path)
    tier = open_tier()
    mount(tmp_path)
    tier.pins.add(pin("new"))
    assert tier.flush(600)
    assert tier.pins.waiting() == [pin("on the disk")]
    tier.close()
    assert {each.name for each in open_tier().pins.waiting()} == {"on the disk", "new"}


def test_pins_of_a_disk_on_which_they_are_still_to_be_cleared_do_not_wait(
    open_tier: OpenTier, clock: FakeClock
) -> None:
    tier = open_tier()
    for group in (ANN, BEN):
        tier.pins.add(pin(group.hex(), group))
    tier.close()
    with mock.patch("radixkv.tiers.disk.open_store.FolderLock", side_effect=OSError("gone")):
        tier = open_tier()
    tier.clear(ANN)
    clock.now += 60
    put(tier)
    for _ in range(2):
        assert tier.pins.waiting() == [pin(BEN.hex(), BEN)]
        tier.close()
        tier = open_tier()


def full(*args: object) -> None:
    raise sqlite3.OperationalError("database or disk is full")


def test_of_what_one_tenant_had_pinned_the_latest_come_back(open_tier: OpenTier, tmp_path: Path) -> None:
    tier = open_tier()
    for number in range(70):
        tier.pins.add(pin(f"{number}", by_tenant=True))
    tier.pins.add(pin("of another", BEN, by_tenant=True))
    tier.close()
    tier = open_tier()
    waiting = [each.name for each in tier.pins.waiting()]
    assert sorted(waiting) == sorted([*(f"{number}" for number in range(6, 70)), "of another"])
    tier.close()
    assert names_in_index(tmp_path) == waiting


def test_a_tenants_limit_counts_only_its_own_pins_that_last(open_tier: OpenTier) -> None:
    """The administrator's pin for a tenant was deleted once the tenant had 64 of its own, expired ones included."""
    tier = open_tier()
    tier.pins.add(pin("administrator's", expires_at=None))
    tier.pins.add(pin("first", by_tenant=True))
    for number in range(63):
        tier.pins.add(pin(f"{number}", by_tenant=True))
    tier.pins.add(pin("over", expires_at=1.0, by_tenant=True))
    tier.close()
    tier = open_tier()
    waiting = [each.name for each in tier.pins.waiting()]
    assert waiting == ["administrator's", "first", *(f"{number}" for number in range(63))]
    tier.pins.add(pin("latest", by_tenant=True))
    tier.close()
    waiting = [each.name for each in open_tier().pins.waiting()]
    assert waiting == ["administrator's", *(f"{number}" for number in range(63)), "latest"]


def test_rows_that_make_no_sense_are_no_pins(open_tier: OpenTier, tmp_path: Path) -> None:
    tier = open_tier()
    tier.pins.add(pin("sound"))
    tier.close()
    rows: Iterable[IndexedPin] = [
        IndexedPin("tokens", ANN, ANN, False, None, TOKENS[:-1]),
        IndexedPin("none", ANN, ANN, False, None, b""),
        IndexedPin("digest", ANN[:-1], ANN, False, None, TOKENS),
        IndexedPin("time", ANN, ANN, False, "soon", TOKENS),  # type: ignore[arg-type]
        IndexedPin(b"name", ANN, ANN, False, None, TOKENS),  # type: ignore[arg-type]
        IndexedPin("namespace", ANN, "n" * len(ANN), False, None, TOKENS),  # type: ignore[arg-type]
        IndexedPin("text", ANN, ANN, False, None, "t" * len(TOKENS)),  # type: ignore[arg-type]
    ]
    index = index_of(tmp_path)
    index.change_pins([], [], rows)
    index.close()
    tier = open_tier()
    assert [each.name for each in tier.pins.waiting()] == ["sound"]
    tier.close()
    assert names_in_index(tmp_path) == ["sound"]


def test_a_group_that_is_cleared_again_while_that_is_written_is_cleared_again(tmp_path: Path) -> None:
    """A pin of it came between the two times, and was there again after a restart, with its prompt."""
    pins, index = StoredPins(RecordCodec(FORMAT), lambda: None), SlotIndex(tmp_path, writable=True)
    change_pins = SlotIndex.change_pins

    def clear_and_change(*arguments: Any) -> None:
        pins.clear(ANN)
        change_pins(*arguments)

    pins.clear(ANN)
    pins.add(pin("one"))
    with mock.patch.object(SlotIndex, "change_pins", clear_and_change):
        pins.commit(index)
    assert pins.has_unwritten
    pins.commit(index)
    assert index.pins() == []
    assert not pins.has_unwritten
    index.close()


@pytest.mark.parametrize("group", [ANN, None], ids=["a group", "all"])
def test_what_is_cleared_is_forgotten_whether_it_waits_or_is_in_force_or_unwritten(
    tmp_path: Path, group: bytes | None
) -> None:
    index = SlotIndex(tmp_path, writable=True)
    earlier, pins = (StoredPins(RecordCodec(FORMAT), lambda: None) for _ in range(2))
    for each in (pin("waiting"), pin("another's", BEN)):
        earlier.add(each)
    earlier.commit(index)
    pins.load(index.pins())
    pins.add(pin("in force"))
    pins.commit(index)
    for name in ("unwritten", "released"):
        pins.add(pin(name))
    pins.remove("released")
    pins.clear(group)
    left = [] if group is None else [pin("another's", BEN)]
    assert pins.waiting() == left
    pins.load([])  # of another disk, which is to have all that is remembered
    pins.commit(index)
    assert [row.name for row in index.pins()] == [each.name for each in left]
    index.close()


def test_an_index_that_is_opened_anew_brings_back_no_pin_that_is_in_force_or_released(tmp_path: Path) -> None:
    index = SlotIndex(tmp_path, writable=True)
    earlier, pins = (StoredPins(RecordCodec(FORMAT), lambda: None) for _ in range(2))
    for name in ("waiting", "released"):
        earlier.add(pin(name))
    earlier.commit(index)
    pins.load(index.pins())
    pins.add(pin("in force"))
    pins.commit(index)
    pins.remove("released")
    pins.load(index.pins())
    assert pins.waiting() == [pin("waiting")]
    index.close()


def test_a_pin_that_is_released_while_it_is_written_is_forgotten(tmp_path: Path) -> None:
    pins, index = StoredPins(RecordCodec(FORMAT), lambda: None), SlotIndex(tmp_path, writable=True)
    change_pins = SlotIndex.change_pins

    def release_and_change(*arguments: Any) -> None:
        pins.remove("one")
        change_pins(*arguments)

    pins.add(pin("one"))
    with mock.patch.object(SlotIndex, "change_pins", release_and_change):
        pins.commit(index)
    assert pins.has_unwritten
    pins.commit(index)
    assert index.pins() == []
    index.close()


def test_encrypted_tokens_are_those_of_no_other_pin(tmp_path: Path) -> None:
    codec, index = RecordCodec(FORMAT, bytes(32)), SlotIndex(tmp_path, writable=True)
    earlier, pins = (StoredPins(codec, lambda: None) for _ in range(2))
    for name, group in (("one", ANN), ("one of ben's", BEN), ("another", ANN)):
        earlier.add(pin(name, group))
    earlier.commit(index)
    one, of_ben, another = index.pins()
    pins.load([one, of_ben._replace(tokens=one.tokens), another._replace(tokens=one.tokens)])
    assert pins.waiting() == [pin("one")]
    index.close()
