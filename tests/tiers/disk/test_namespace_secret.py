"""The secret of stored namespaces: the same after a restart, on all machines, and while a shared folder is gone."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from support.faulty_os import disconnected

from radixkv.tiers.disk import namespace_secret
from radixkv.tiers.disk.namespace_secret import find_secret, keep_secret


def secret(disk: Path | None, shared: Path | None, *, read_only: bool = False) -> bytes:
    found = find_secret(None, disk, None if shared is None else str(shared), read_only=read_only)
    assert found is not None
    assert len(found) == 32
    return found


def test_a_shared_folder_takes_over_what_a_disk_had(tmp_path: Path) -> None:
    """Once a shared folder was added, what was on the disk used to be lost."""
    disk, shared = tmp_path / "disk", tmp_path / "shared"
    first = secret(disk, None)
    assert secret(disk, shared) == first
    assert [path.name for path in disk.iterdir()] == ["namespaces.secret"]  # a copy would be the same
    assert secret(None, shared) == secret(tmp_path / "another", shared) == first
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("*/*.secret"))


@pytest.mark.parametrize("has_own", [False, True])
def test_a_disk_is_found_while_the_shared_folder_is_gone(
    tmp_path: Path, has_own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk used to get a random secret instead: it found nothing, and was filled with what would not be found."""
    disk, shared, gone = tmp_path / "disk", tmp_path / "shared", tmp_path / "gone"
    theirs = secret(None, shared)
    if has_own:
        assert secret(disk, None) != theirs
    assert secret(disk, shared) == theirs
    shared.rename(gone)
    shared.write_text("no folder")
    with caplog.at_level(logging.WARNING):
        assert secret(disk, shared) == secret(disk, shared, read_only=True) == theirs
    assert not caplog.records  # the tier itself warns
    shared.unlink()
    other = secret(None, shared)
    assert secret(disk, shared) == other != theirs  # it was made anew
    shared.rename(tmp_path / "gone too")
    shared.write_text("no folder")
    assert secret(disk, shared) == other


@pytest.mark.parametrize("has_own", [False, True])
def test_the_mount_point_of_a_shared_folder_that_is_gone_gets_the_same_secret(tmp_path: Path, has_own: bool) -> None:
    """It got another one, which replaced the copy: what was on the disk was not found, not even during a later outage."""
    disk, shared = tmp_path / "disk", tmp_path / "shared"
    theirs = secret(None, shared)
    if has_own:
        assert secret(disk, None) != theirs
    assert secret(disk, shared) == theirs
    shared.rename(tmp_path / "mounted elsewhere")
    shared.mkdir()
    assert secret(disk, shared) == secret(disk, shared, read_only=True) == theirs
    (shared / "namespaces.secret").unlink()
    shared.rmdir()
    shared.write_text("no folder")
    assert secret(disk, shared) == theirs


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_hard_links_holds_a_secret(tmp_path: Path, error: int) -> None:
    """It got another one at each start, and nothing that was stored was found by other processes."""
    disk, shared = tmp_path / "disk", tmp_path / "shared"
    with mock.patch.object(os, "link", side_effect=OSError(error, os.strerror(error))):
        first = secret(None, shared)
        assert secret(disk, shared) == first
        with mock.patch.object(namespace_secret, "_is_made", side_effect=[False, True]):  # a moment before
            assert secret(None, shared) == first
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["namespaces.secret", "shared-namespaces.secret"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("*/*.secret"))


def test_a_secret_that_another_process_makes_without_hard_links_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file, which is empty for a moment, was refused, and the engine did not start."""
    path, theirs = tmp_path / "namespaces.secret", bytes(range(32))
    path.touch()
    monkeypatch.setattr(namespace_secret, "time", SimpleNamespace(sleep=lambda seconds: path.write_bytes(theirs)))
    namespace_secret.check_secret(tmp_path, theirs)
    path.write_bytes(b"")
    assert secret(tmp_path, None, read_only=True) == theirs


@pytest.mark.parametrize("has_links", [False, True])
def test_a_secret_that_a_killed_process_left_empty_is_made_by_the_next(
    tmp_path: Path, has_links: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing started before the file was removed."""
    disk, shared = tmp_path / "disk", tmp_path / "shared"
    paths = [disk / "namespaces.secret", disk / "shared-namespaces.secret", shared / "namespaces.secret"]
    no_links = mock.patch.object(os, "link", side_effect=OSError(errno.EPERM, "no links"))
    with no_links, mock.patch.object(os, "replace", side_effect=KeyboardInterrupt):
        for path in paths:
            with pytest.raises(KeyboardInterrupt):
                namespace_secret._make(path, bytes(32))
    assert [path.stat().st_size for path in paths] == [0, 0, 0]
    monkeypatch.setattr(namespace_secret, "time", SimpleNamespace(sleep=lambda seconds: None))
    namespace_secret.check_secret(shared, bytes(32))
    reader = secret(disk, None, read_only=True)
    (record,) = caplog.records
    assert "the file is empty" in record.getMessage()
    with nullcontext() if has_links else no_links:
        first = secret(disk, shared)
        assert reader != first == secret(disk, shared) == secret(None, shared)
        namespace_secret.keep_secret(disk, bytes(32))
    assert [path.read_bytes() for path in paths] == [bytes(32), first, first]
    assert sorted(tmp_path.glob("*/*")) == paths


def test_of_two_processes_that_make_a_secret_without_hard_links_one_does(tmp_path: Path) -> None:
    path, theirs = tmp_path / "namespaces.secret", bytes(range(32))

    def made_meanwhile(file: object, operation: int) -> None:
        assert operation == fcntl.LOCK_EX
        path.write_bytes(theirs)

    with (
        mock.patch.object(os, "link", side_effect=OSError(errno.EPERM, "no links")),
        mock.patch.object(fcntl, "flock", made_meanwhile),
    ):
        assert secret(None, tmp_path) == theirs
    assert [path.name for path in tmp_path.iterdir()] == ["namespaces.secret"]


def test_a_secret_that_another_process_made_first_needs_no_lock(tmp_path: Path) -> None:
    """Where files cannot be locked, the second of two processes went on with a secret of its own."""
    first = secret(None, tmp_path)
    with (
        mock.patch.object(namespace_secret, "_is_made", side_effect=[False, True]),  # a moment before
        mock.patch.object(fcntl, "flock", side_effect=OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))),
    ):
        assert secret(None, tmp_path) == first


@pytest.mark.parametrize(("has_disk", "has_shared"), [(True, False), (False, True), (True, True)])
def test_a_secret_that_is_made_although_its_folder_cannot_be_synced_is_in_use(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_disk: bool,
    has_shared: bool,
) -> None:
    """Another one was used until the next start, and nothing was stored."""
    disk, shared = (tmp_path / "disk" if has_disk else None), (tmp_path / "shared" if has_shared else None)
    sync = namespace_secret.sync

    def sync_file(path: Path) -> None:
        if path.is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        sync(path)

    monkeypatch.setattr(namespace_secret, "sync", sync_file)
    with caplog.at_level(logging.WARNING):
        first = secret(disk, shared)
    assert [path.read_bytes() for path in tmp_path.glob("*/namespaces.secret")] == [first]
    assert secret(disk, shared) == first
    for folder in (disk, shared):
        if folder is not None:
            (folder / "namespaces.secret").unlink(missing_ok=True)
            keep_secret(folder, first)
    assert not caplog.records


def test_a_disk_has_its_own_where_the_shared_folder_was_never_there(tmp_path: Path) -> None:
    disk, shared = tmp_path / "disk", tmp_path / "shared"
    shared.write_text("no folder")
    first = secret(disk, shared)
    assert secret(disk, shared) == secret(disk, None) == first
    shared.unlink()
    assert secret(disk, shared) == secret(None, shared) == first


def test_a_disk_that_fails_does_not_hide_the_shared_secret(tmp_path: Path) -> None:
    """It raised where the disk's mount was there, but its server was gone."""
    disk, shared = tmp_path / "disk", tmp_path / "shared"
    theirs = secret(disk, shared)
    with disconnected(disk):
        assert secret(disk, shared) == theirs
    with disconnected(shared):
        assert secret(disk, shared) == theirs
    with disconnected(tmp_path):
        assert secret(disk, shared) != theirs
    assert secret(disk, shared) == theirs


def test_a_reader_without_a_secret_is_told_to_start_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It warned that what it stores is not found after a restart; but it stores nothing, and finds nothing."""
    disk = tmp_path / "disk"
    reader = secret(disk, None, read_only=True)
    (record,) = caplog.records
    assert f"the secret of namespaces in {disk} cannot be used: " in record.getMessage()
    assert (
        "find nothing there, even once another has made it: start again then, or name one cache_" in record.getMessage()
    )
    theirs = secret(disk, None)
    assert reader != theirs == secret(disk, None, read_only=True)
    assert len(caplog.records) == 1
