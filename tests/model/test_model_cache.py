"""The model cache: what no model has used for a long time is removed, and nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv.model.gguf.conversion import converted_folder, ensure_converted
from radixkv.model.model_cache import (
    MANIFEST,
    cache_folder,
    let_others_read,
    mark_used,
    packed_folder,
    quantised_folder,
    remove_unused,
    stored_bytes,
    temporary_folder,
)
from radixkv.model.native.panel_cache import PanelCache

pytestmark = pytest.mark.usefixtures("model_cache")

OLD, KEY = 1_000_000_000, "0123456789abcdef" * 2


def make_old(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name == MANIFEST:
        path.write_text('{"files": {}}')
        path = path.parent
    else:
        path.write_bytes(b"")
    os.utime(path, (OLD, OLD))
    return path


def test_what_is_old_is_removed_unless_it_is_marked(model_cache: Path) -> None:
    for prefix in ("", "marked"):
        paths = [
            make_old(model_cache / "tiny-0123-blocks" / MANIFEST),
            make_old(quantised_folder() / f"{KEY}.safetensors"),
            make_old(packed_folder() / KEY),
            make_old(packed_folder() / f"{KEY}.a1_b2c3d"),  # its writer was killed
        ]
        if prefix:
            for path in paths:
                mark_used(path)
        remove_unused()
        assert [path.exists() for path in paths] == [bool(prefix)] * 4


def test_a_conversion_whose_process_was_killed_is_removed_when_it_is_old(model_cache: Path, tmp_path: Path) -> None:
    """It has no manifest, and used to stay for ever."""
    gguf = tmp_path / "tiny model.v2.gguf"
    gguf.write_bytes(b"GGUF")
    targets = [converted_folder(gguf, in_blocks) for in_blocks in (False, True)]
    model_cache.mkdir()
    for target in targets:
        with temporary_folder(target) as temporary:
            temporary.mkdir()
            (temporary / "blocks.safetensors").write_bytes(b"weights")
            shutil.copytree(temporary.parent, f"{temporary.parent}.left")
    remove_unused()
    assert len([*model_cache.iterdir()]) == 2
    for folder in model_cache.iterdir():
        os.utime(folder, (OLD, OLD))
    remove_unused()
    assert not [*model_cache.iterdir()]


def test_only_what_is_made_there_is_counted(model_cache: Path) -> None:
    assert stored_bytes() == 0
    make_old(model_cache / "tiny-0123-blocks" / MANIFEST)
    before = stored_bytes()
    (model_cache / "tiny-0123-blocks" / "blocks.safetensors").write_bytes(b"0" * 100)
    make_old(quantised_folder() / f"{KEY}.safetensors").write_bytes(b"0" * 20)
    make_old(packed_folder() / KEY).write_bytes(b"0" * 3)
    make_old(model_cache / "notes.txt").write_bytes(b"0" * 1000)
    assert stored_bytes() == before + 123


def test_a_conversion_that_is_finished_meanwhile_does_not_end_the_count(
    model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what came after it nothing was counted."""
    make_old(quantised_folder() / f"{KEY}.safetensors").write_bytes(b"0" * 20)
    scandir = os.scandir
    with temporary_folder(model_cache / "tiny-0123") as temporary, monkeypatch.context() as patch:
        temporary.mkdir()

        def finish_first(path: Any) -> Any:
            if path == temporary:
                temporary.rename(model_cache / "tiny-0123")
            return scandir(path)

        patch.setattr(os, "scandir", finish_first)
        assert stored_bytes() == 20


def test_files_of_others_stay(model_cache: Path) -> None:
    """The folder may hold other things, too. One that was named like a conversion's used to be removed."""
    paths = [
        model_cache / "notes.txt",
        model_cache / "packed" / "lunch",
        model_cache / "quantised" / f"{KEY}.txt",
        model_cache / "a" / "b.json",
        model_cache / "a-0123456789abcdef-4.abcd1234" / "b.json",
        model_cache / "run-2024_05_06-12_30-7.finished" / "model",
    ]
    paths = [make_old(path) for path in paths]
    for path in paths:
        os.utime(path.parent, (OLD, OLD))
    remove_unused()
    assert all(path.exists() for path in paths)


def test_using_a_conversion_and_panels_marks_them(model_cache: Path, tmp_path: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")
    folder = make_old(converted_folder(gguf) / MANIFEST)
    panels = PanelCache(quantised_folder())
    panels.write(KEY, torch.ones(3))
    file = quantised_folder() / f"{KEY}.safetensors"
    os.utime(file, (OLD, OLD))
    assert ensure_converted(gguf, print) == folder
    assert panels.read(KEY) is not None
    remove_unused()
    assert folder.exists()
    assert file.exists()


def test_a_new_file_is_readable_by_those_who_may_look_into_its_folder(tmp_path: Path) -> None:
    """Weights were their writer's alone, so other users of the same cache saw a model that they could not load."""
    for mode, expected in ((0o755, 0o644), (0o700, 0o600), (0o1777, 0o644)):
        folder = tmp_path / f"{mode:o}"
        folder.mkdir()
        folder.chmod(mode)
        PanelCache(folder).write(KEY, torch.zeros(4))
        (path,) = folder.iterdir()
        assert path.stat().st_mode & 0o777 == expected
        path.chmod(0o600)
        let_others_read(path)
        assert path.stat().st_mode & 0o777 == expected


def test_the_cache_may_be_given_by_its_place_in_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXKV_CACHE", "~/cache")
    assert cache_folder() == Path.home() / "cache"


def test_without_a_home_nothing_is_kept_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every model failed, those that need no cache, too."""

    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("RADIXKV_CACHE")
    monkeypatch.setattr(Path, "expanduser", no_home)
    remove_unused()
    panels = PanelCache(quantised_folder())
    assert panels.read(KEY) is None
    panels.write(KEY, torch.zeros(4))
    assert "quantised weights cannot be kept" in caplog.text


def test_a_cache_that_may_not_be_looked_into_stops_neither_a_model_nor_a_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model was loaded, and then lost."""

    def refused(path: Path, pattern: str) -> list[Path]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "glob", refused)
    remove_unused()
    assert stored_bytes() == 0
