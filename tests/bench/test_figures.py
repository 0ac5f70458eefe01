"""The files of figures, which benches rewrite while they may be killed."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from radixkv.bench.common.figures import write_figures


def test_links_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    """As root, figures for /dev/null used to replace the device by a file."""
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    file.write_text("old")
    link.symlink_to(file)
    write_figures(link, {"new": 1})
    assert (link.is_symlink(), json.loads(file.read_text())) == (True, {"new": 1})
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read_back = pool.submit(pipe.read_text)
        write_figures(pipe, {"a": 1, "b": [2]})
        assert json.loads(read_back.result()) == {"a": 1, "b": [2]}
    assert pipe.is_fifo()
    assert sorted(tmp_path.iterdir()) == [file, link, pipe]


def test_a_bench_that_is_killed_leaves_the_figures_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the GPU benches replaced their files: an interrupt while others were written left half of one."""
    path = tmp_path / "figures.json"
    write_figures(path, {"rows": 1})
    written = Path.write_text

    def interrupted(file: Path, text: str) -> int:
        written(file, text[:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_figures(path, {"rows": 2})
    assert json.loads(path.read_text()) == {"rows": 1}


def test_a_file_in_a_folder_that_may_not_be_written_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "figures.json"
    path.touch()
    monkeypatch.setattr(os, "access", lambda folder, mode: False)  # which root may always
    inode = path.stat().st_ino
    write_figures(path, {"rows": 1})
    assert (path.stat().st_ino, json.loads(path.read_text())) == (inode, {"rows": 1})
