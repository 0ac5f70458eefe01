"""Pages of a file that weights lie in: given back, and read again when they are needed."""

from __future__ import annotations

import ctypes
import logging
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from radixkv.model.weights.mapped import MappedWeights

SIZE = 1 << 20


@pytest.fixture
def mapped(tmp_path: Path) -> nn.Module:
    """A layer whose weight lies in a file."""
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.arange(SIZE, dtype=torch.float32).view(1024, 1024)}, path)
    layer = nn.Linear(1024, 1024, bias=False, device="meta")
    layer.weight = nn.Parameter(load_file(path)["weight"], requires_grad=False)
    return layer


def resident_bytes(start: int) -> int:
    """Resident bytes of the mapping that begins there."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(f"{start:x}-"))
    return int(next(line for line in lines if line.startswith("Rss:")).split()[1]) * 1024


def test_pages_that_were_read_are_given_back_and_read_again(mapped: nn.Module) -> None:
    total = mapped.weight.sum()
    weights = MappedWeights(mapped)
    ((start, size),) = weights.spans
    assert size >= SIZE * 4
    assert resident_bytes(start) >= SIZE * 4
    weights.release()
    assert resident_bytes(start) == 0
    assert mapped.weight.sum() == total


def test_weights_that_were_changed_are_not_released(mapped: nn.Module) -> None:
    mapped.weight[3, 5] = -1.0
    weights = MappedWeights(mapped)
    weights.release()
    assert weights.spans == []
    assert mapped.weight[3, 5] == -1.0


def test_weights_in_memory_are_left_alone() -> None:
    assert MappedWeights(nn.Linear(8, 8)).spans == []


def test_pages_are_counted_only_where_weights_are_mapped(mapped: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes tens of milliseconds in a large process, a third of the time in which a small model in memory is prepared."""
    read_text, read = Path.read_text, list[str]()

    def noting(path: Path) -> str:
        read.append(path.name)
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", noting)
    MappedWeights(nn.Linear(8, 8))
    assert read == ["maps"]
    assert MappedWeights(mapped).spans
    assert read == ["maps", "maps", "smaps"]


@pytest.mark.parametrize("pages", ["Anonymous", "Swap", "Private_Hugetlb", "Shared_Hugetlb"])
def test_pages_of_no_file_stay(mapped: nn.Module, monkeypatch: pytest.MonkeyPatch, pages: str) -> None:
    """What lies in the swap, or in large pages, which malloc may use, is not counted as anonymous memory."""
    read_text = Path.read_text
    smaps = Path("/proc/self/smaps").read_text()
    ((start, _),) = MappedWeights(mapped).spans
    before, own = smaps[: smaps.index(f"\n{start:x}-")], smaps[smaps.index(f"\n{start:x}-") :]
    none = re.compile(rf"^{pages}: *0 kB$", re.MULTILINE)
    assert none.search(own)
    changed = before + none.sub(f"{pages}: 2048 kB", own, count=1)
    monkeypatch.setattr(Path, "read_text", lambda path: changed if path.name == "smaps" else read_text(path))
    assert MappedWeights(mapped).spans == []


def test_a_mapping_that_is_locked_stays_and_is_spoken_of_once(
    mapped: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    weights = MappedWeights(mapped)
    ((start, _),) = weights.spans
    total, libc = mapped.weight.sum(), ctypes.CDLL(None)
    page = ctypes.c_void_p(start), ctypes.c_size_t(4096)
    if libc.mlock(*page):
        pytest.skip("the system lets this process lock no memory")
    with caplog.at_level(logging.WARNING):
        weights.release()
        weights.release()
    libc.munlock(*page)
    assert [record.getMessage().endswith("madvise: Invalid argument") for record in caplog.records] == [True]
    assert weights.spans == []
    assert mapped.weight.sum() == total


def test_what_was_mapped_stays_mapped_when_the_weights_are_gone(mapped: nn.Module) -> None:
    """Otherwise something else could lie at its address, and would be lost."""
    weights = MappedWeights(mapped)
    ((start, size),) = weights.spans
    mapped.weight = nn.Parameter(torch.zeros(1), requires_grad=False)
    assert f"\n{start:x}-{start + size:x} " in Path("/proc/self/smaps").read_text()
