"""What a machine lacks for a first light is named at once, and a GPU that launches no kernel is found before all else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.compiled_kernels import pretended_gpu
from support.tensors_on_cpu import OnCpu

from radixkv.bench.gpu import ready
from radixkv.bench.gpu.ready import main, missing_modules, needed_modules


def test_all_that_is_missing_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_one.py").write_text("import absent_one")
    (tmp_path / "breaks.py").write_text("raise AttributeError('built for another numpy')")
    names = ["json", "absent_one", "needs_one", "absent_two", "breaks"]
    monkeypatch.setattr(ready, "needed_modules", lambda: names)
    assert main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "absent_one cannot be imported: ModuleNotFoundError: No module named 'absent_one'",
        "absent_two cannot be imported: ModuleNotFoundError: No module named 'absent_two'",
        "breaks cannot be imported: AttributeError: built for another numpy",
    ]


def test_the_projects_requirements_are_looked_for() -> None:
    names = needed_modules()
    assert {"gguf", "huggingface_hub", "pydantic", "torch", "transformers", "triton", "radixkv.llm"} <= set(names)
    assert not list(missing_modules(names))


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main() == 1
    assert "finds no CUDA device" in capsys.readouterr().out


def test_a_kernel_that_does_nothing_is_no_kernel_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with (
        pretended_gpu(lambda *args, **options: None),
        OnCpu(),
        pytest.raises(RuntimeError, match=r"is \(30, 0\) instead of \(31, 95\)"),
    ):
        main()
