"""Packed weights that several processes map: equal answers, one file for all, and files that are not what they should be."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest
import torch
from support.model_zoo import build_supported

from radixkv import LLM, SamplingParams
from radixkv.model.native import weights_of
from radixkv.model.weights import shared as shared_weights
from radixkv.model.weights.shared import share_weights
from radixkv_cpu import PackedWeight, Weight, library

pytestmark = pytest.mark.skipif(library() is None, reason="no native code runs here")


def weight() -> PackedWeight:
    torch.manual_seed(0)
    return PackedWeight([torch.randn(70, 64), torch.randn(30, 64)], [torch.randn(70), None])


def file_of(weight: Weight) -> str | None:
    """The file that a weight is mapped from."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= weight.panels.data_ptr() < stop:
            return next(iter(re.findall(r"/.*", line)), None)
    return None


def test_a_model_answers_the_same_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXKV_CACHE", str(tmp_path))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    answers, models = [], []
    for share in (None, True, True):
        llm = LLM(build_supported("llama"), share_weights=share, num_blocks=20)
        answers.append(llm.generate([{"prompt_token_ids": [1, 2, 3, 4, 5]}], params)[0].outputs[0].token_ids)
        models.append(weights_of(llm.engine.loaded.model))
    assert answers[0] == answers[1] == answers[2]
    assert all(file_of(weight) is None for weight in models[0])
    assert models[1]
    for first, second in zip(*models[1:], strict=True):
        path = file_of(first)
        assert path is not None
        assert Path(path).parent == tmp_path / "packed"
        assert file_of(second) == path
        assert first.panels.data_ptr() != second.panels.data_ptr()


def test_products_and_rows_are_those_of_the_mapped_weight(tmp_path: Path) -> None:
    shared, x = weight(), torch.randn(3, 64)
    before = shared.panels
    share_weights([shared], tmp_path)
    before.zero_()
    assert torch.equal(shared.multiply(x), weight().multiply(x))
    assert torch.equal(shared.rows(torch.arange(100)), weight().rows(torch.arange(100)))


@pytest.mark.parametrize("damage", ["a byte", "the end"])
def test_a_damaged_file_is_written_again(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    share_weights([weight()], tmp_path)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    path.unlink()  # the first weight has mapped that one
    path.write_bytes(content[:-1] if damage == "the end" else b"x" + content[1:])
    again = weight()
    share_weights([again], tmp_path)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"{path} is damaged: writing it again"
    ]
    assert path.read_bytes() == content
    assert file_of(again) == str(path)
    assert torch.equal(again.panels, weight().panels)


def test_the_slower_of_two_replicas_maps_the_file_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise two replicas that start at once would each map a file of its own."""
    first, second = weight(), weight()
    share_weights([first], tmp_path)
    number = next(tmp_path.iterdir()).stat().st_ino
    seen = iter([False])
    real = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: next(seen, None) if path.parent == tmp_path else real(path))
    share_weights([second], tmp_path)
    assert [path.stat().st_ino for path in tmp_path.iterdir()] == [number]
    assert file_of(second) == file_of(first)


def test_a_file_is_for_all_who_may_look_into_its_folder_and_marked_as_used(tmp_path: Path) -> None:
    """Else other users' replicas have weights of their own, and what is in use is removed when it is old."""
    tmp_path.chmod(0o755)
    share_weights([weight()], tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o644
    os.utime(path, (0, 0))
    share_weights([weight()], tmp_path)
    assert path.stat().st_mtime > 0


@pytest.mark.parametrize("place", ["a file", "a disk that keeps something else"])
def test_weights_stay_where_no_file_can_be_written(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "packed"
    if place == "a file":
        folder.write_text("no folder")
    else:
        monkeypatch.setattr(shared_weights, "_write", lambda path, content: path.write_bytes(bytes(content.nbytes)))
    own = weight()
    share_weights([own, weight()], folder)
    assert file_of(own) is None
    assert [record.levelname for record in caplog.records if record.levelno >= logging.WARNING] == ["WARNING"]
    assert "this process has its own" in caplog.text


def test_only_equal_panels_take_the_place_of_others() -> None:
    own = weight()
    with pytest.raises(ValueError, match="panels: expected shape"):
        own.move(own.panels[:1])
    with pytest.raises(ValueError, match="panels: expected float32"):
        own.move(own.panels.double())
