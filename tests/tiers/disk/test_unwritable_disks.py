"""A store on a disk that is full or cannot be written: it is read and, where it can be made smaller, used."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.disk_tiers import BLOCKS, BOB, SLOT, pin_of, put, tier_in
from support.disk_tiers import KEYS as ANN
from support.tier_model import FORMAT, FakeClock, get, prefix_keys
from typer.testing import CliRunner

from radixkv.cli.main import app
from radixkv.tiers.disk import open_store
from radixkv.tiers.disk_tier import DiskTier

ReadOnlyFolder = Callable[[Path], AbstractContextManager[Path]]


@pytest.fixture
def read_only_folder(tmp_path_factory: pytest.TempPathFactory) -> ReadOnlyFolder:
    """Mounts a folder at a place where it cannot be written."""

    @contextmanager
    def mounted(folder: Path) -> Iterator[Path]:
        place = tmp_path_factory.mktemp("mounted")
        try:
            subprocess.run(["mount", "--bind", folder, place], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("only root can mount a folder")
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)
            yield place
        finally:
            subprocess.run(["umount", "--lazy", place], check=True)

    return mounted


def test_a_store_that_cannot_be_written_can_be_read(root: Path, read_only_folder: ReadOnlyFolder) -> None:
    """SQLite used to refuse, because it could not make its files beside the index."""
    with read_only_folder(root) as mounted:
        clock = FakeClock()
        tier = DiskTier(mounted, FORMAT, capacity_bytes=64 * SLOT, read_only=True, clock=clock)
        assert np.array_equal(get(tier, ANN), BLOCKS)
        for command, shown in (("info", "9 blocks of 4 tokens"), ("verify", "9 right, 0 corrupt")):
            assert shown in CliRunner().invoke(app, ["store", command, str(mounted)]).output
        writer = tier_in(root)
        other = prefix_keys("eve", 1)
        put(writer, other, BLOCKS[:1])
        clock.now += 1
        assert np.array_equal(get(tier, other), BLOCKS[:1])
        tier.close()
        writer.close()


def test_a_store_that_cannot_be_written_is_not_read_without_its_log(
    root: Path, tmp_path_factory: pytest.TempPathFactory, read_only_folder: ReadOnlyFolder
) -> None:
    killed = tmp_path_factory.mktemp("killed") / "store"
    tier = tier_in(root)
    put(tier, prefix_keys("eve", 1), BLOCKS[:1])
    shutil.copytree(root, killed)
    tier.close()
    (shared,) = killed.glob("*/index.sqlite-shm")
    shared.unlink()
    with read_only_folder(killed) as mounted:
        reader = DiskTier(mounted, FORMAT, capacity_bytes=64 * SLOT, read_only=True)
        assert (reader.contains_prefix(ANN), reader.stats.errors) == (0, 1)
        reader.close()


@pytest.fixture
def full_disk(root: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The folder of stores on a disk that others have filled; of a process that was killed, if a test says so."""
    place = tmp_path_factory.mktemp("small")
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", place], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root can mount a disk")
    try:
        with ExitStack() as opened:
            if getattr(request, "param", "closed") == "killed":
                tier = opened.enter_context(closing(tier_in(root)))
                for key in BOB:
                    tier.pins.add(replace(pin_of(key), tokens=bytes(8 * SLOT)))  # the index is to grow by its log
                    assert tier.flush(600)
            shutil.copytree(root, place / "store")
        with pytest.raises(OSError, match="No space left"), open(place / "others", "wb", buffering=0) as others:
            while True:
                others.write(bytes(512))
        yield place / "store"
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def test_a_store_on_a_full_disk_can_be_read(full_disk: Path) -> None:
    """SQLite had no room for a file beside the index, which was then said to be unreadable."""
    tier = DiskTier(full_disk, FORMAT, capacity_bytes=64 * SLOT, read_only=True)
    assert np.array_equal(get(tier, ANN), BLOCKS)
    tier.close()
    for command, shown in (("info", "9 blocks of 4 tokens"), ("verify", "9 right, 0 corrupt")):
        assert shown in CliRunner().invoke(app, ["store", command, str(full_disk)]).output


@pytest.mark.parametrize("full_disk", ["closed", "killed"], indirect=True)
@pytest.mark.parametrize("pruned", [False, True])
def test_a_store_on_a_full_disk_can_be_used(full_disk: Path, monkeypatch: pytest.MonkeyPatch, pruned: bool) -> None:
    """A process that was started there found nothing, and not even `radixkv store prune` could make room."""
    monkeypatch.setattr(open_store, "_INDEX_ROOM_BYTES", 50 * SLOT)
    if pruned:
        command = ["store", "prune", str(full_disk), "--max-gib", str(7 * SLOT / (1 << 30))]
        assert "2 blocks removed" in CliRunner().invoke(app, command).output
    tier = tier_in(full_disk)
    assert np.array_equal(get(tier, ANN), BLOCKS)
    eve = prefix_keys("eve", 1)
    put(tier, eve, BLOCKS[:1])
    assert tier.contains_prefix(eve) == 1
    tier.close()


def test_a_disk_with_little_room_is_pruned(full_disk: Path) -> None:
    """There was room for one of the files beside the index, so that no slots were given up, but not for its log."""
    others = full_disk.parent / "others"
    os.truncate(others, others.stat().st_size - 8 * SLOT)
    command = ["store", "prune", str(full_disk), "--max-gib", str(4 * SLOT / (1 << 30))]
    assert "5 blocks removed" in CliRunner().invoke(app, command).output


def test_blocks_that_a_full_disk_costs_are_forgotten(full_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their slots were given up, and pruning moved nothing in their place and kept them."""
    monkeypatch.setattr(open_store, "_INDEX_ROOM_BYTES", 60 * SLOT)
    command = ["store", "prune", str(full_disk), "--max-gib", str(9 * SLOT / (1 << 30))]
    assert "5 blocks removed" in CliRunner().invoke(app, command).output
    for name, shown in (("info", "4 blocks of 4 tokens"), ("verify", "4 right, 0 corrupt")):
        assert shown in CliRunner().invoke(app, ["store", name, str(full_disk)]).output
