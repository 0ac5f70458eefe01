"""Slots in many files, of which few are open."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from support.disk_tiers import SLOT, OpenTier, files_open_in, put, slot_file
from support.faulty_os import disconnected
from support.tier_model import get, prefix_keys, random_blocks

from radixkv.tiers.disk import slot_files
from radixkv.tiers.disk.open_files import OpenFiles
from radixkv.tiers.disk.slot_files import SlotFiles

KEYS = prefix_keys("ann", *range(40))
BLOCKS = random_blocks(0, 40)


def test_a_store_of_many_files_has_few_of_them_open(
    open_tier: OpenTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All used to stay open: a disk of a quarter of a terabyte left no descriptor to the rest of the process."""
    monkeypatch.setattr(slot_files, "FILE_BYTES", 2 * SLOT)
    monkeypatch.setattr(slot_files, "MAX_OPEN_FILES", 3)

    def check_open() -> None:
        assert len([path for path in files_open_in(tmp_path) if "blocks-" in path]) <= 3

    tier = open_tier()
    for count in range(8, 41, 8):
        put(tier, KEYS[:count], BLOCKS[:count])
        check_open()
    assert np.array_equal(get(tier, KEYS), BLOCKS)
    check_open()
    tier.close()
    assert not files_open_in(tmp_path)
    tier = open_tier()
    check_open()
    assert np.array_equal(get(tier, KEYS), BLOCKS)
    tier.close()
    tier = open_tier(capacity_bytes=5 * SLOT)
    check_open()
    sizes = [path.stat().st_size // SLOT for path in sorted(tmp_path.glob("store/*/blocks-*"))]
    assert sizes == [2, 2, 1] + [0] * (len(sizes) - 3)
    assert np.array_equal(get(tier, KEYS), BLOCKS[:5])


def test_what_was_written_is_read_on_a_disk_that_became_read_only(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier()
    put(tier, KEYS[:8], BLOCKS[:8])
    tier.close()
    tier = open_tier()
    real = os.open

    def refuse_to_write(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, "read-only file system")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse_to_write)
    assert np.array_equal(get(tier, KEYS[:8]), BLOCKS[:8])


def test_a_removed_file_is_not_made_by_reading_it(open_tier: OpenTier, tmp_path: Path) -> None:
    """It was made anew, empty."""
    tier = open_tier()
    put(tier, KEYS[:8], BLOCKS[:8])
    tier.close()
    tier = open_tier()
    slot_file(tmp_path).unlink()
    assert len(get(tier, KEYS[:8])) == 0
    assert tier.stats.errors == 1
    assert not [*tmp_path.glob("store/*/blocks-*")]
    tier.close()
    tier = open_tier()
    put(tier, KEYS[:8], BLOCKS[:8])
    assert np.array_equal(get(tier, KEYS[:8]), BLOCKS[:8])


def test_space_that_a_disk_fails_to_give_back_is_not_taken_for_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Python 3.14, whose `Path.exists` is False then, clearing everything left the bytes without an error."""
    monkeypatch.setattr(Path, "exists", lambda path: os.path.exists(path))
    files = SlotFiles(tmp_path, SLOT, writable=True)
    files.grow(4)
    with disconnected(tmp_path), pytest.raises(OSError, match="not connected"):
        files.shrink(0)
    files.shrink(0)
    assert (tmp_path / "blocks-00000").stat().st_size == 0
    files.close()


def test_a_file_in_use_stays_open_and_is_closed_after_it(tmp_path: Path) -> None:
    files = OpenFiles(lambda index: os.open(tmp_path / str(index), os.O_CREAT), 2)
    with files.opened(0) as first:
        with files.opened(1), files.opened(2), files.opened(0) as again:
            assert again == first
            assert files_open_in(tmp_path) == [str(tmp_path / name) for name in "012"]
        assert files_open_in(tmp_path) == [str(tmp_path / name) for name in "01"]
        files.close()
        assert files_open_in(tmp_path) == [str(tmp_path / "0")]
    assert not files_open_in(tmp_path)
