"""`radixkv doctor` says what the machine offers and what is done with it."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from radixkv.cli import doctor

read_bandwidth = doctor._read_bandwidth


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring it takes longer than everything else."""
    monkeypatch.setattr(doctor, "_read_bandwidth", lambda: 12.3e9)


def found(what: str) -> doctor.Finding:
    (finding,) = [finding for finding in doctor.examine() if finding.what == what]
    return finding


def test_instructions_are_named_as_their_makers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setattr(doctor, "cpu_flags", lambda: frozenset({"avx512f", "avx2", "amx_bf16", "sse2"}))
    assert found("CPU").found.endswith("threads, AVX2, AVX-512, AMX")
    monkeypatch.setattr(doctor, "cpu_flags", frozenset)
    assert found("CPU").found.endswith("threads")


@pytest.mark.parametrize(
    ("set_by", "num_cores", "advice"),
    [("OMP_NUM_THREADS", 3, "unset OMP_NUM_THREADS"), ("OMP_NUM_THREADS", 2, ""), ("OTHER", 3, "")],
)
def test_cores_are_those_that_this_process_may_use_and_it_is_said_what_keeps_threads_from_them(
    set_by: str, num_cores: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv(set_by, "2")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {*range(num_cores)})
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    assert found("CPU").found.startswith(f"{num_cores} cores, 2 threads")
    assert found("CPU").advice.partition(",")[0] == advice


@pytest.mark.parametrize(
    ("is_fast", "said"),
    [
        (True, "bfloat16 (int8 and int4 are converted to it)"),
        (False, "float32 (bfloat16, int8 and int4 are converted to it)"),
    ],
)
def test_the_variant_is_named_with_the_type_that_it_computes_in(
    is_fast: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "library", lambda: SimpleNamespace(variant="some", is_fast_in_bf16=is_fast))
    assert found("native code") == doctor.Finding("native code", f"some, {said}")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("RADIXKV_CPU_VARIANT: expected avx2"),
        RuntimeError("compile it again"),
        OSError("libradixkv_cpu_avx2.so: file too short"),
    ],
)
def test_native_code_that_cannot_be_used_is_a_finding(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to end the report with its error alone."""

    def refuse() -> None:
        raise error

    monkeypatch.setattr(doctor, "library", refuse)
    assert found("native code") == doctor.Finding("native code", "cannot be used", str(error))


@pytest.mark.parametrize(
    ("flags", "variant", "advice"),
    [
        ("abm avx2 bmi1 bmi2 f16c fma movbe", "", "install g++, then reinstall RadixKV"),
        ("sse2", "", "it is for x86-64 with AVX2 or later"),
        ("sse2", "none", "unset RADIXKV_CPU_VARIANT, which is none"),
    ],
)
def test_advice_on_missing_native_code_is_what_helps(
    flags: str, variant: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users who had switched the native code off, or had another processor, used to be told to reinstall it."""
    monkeypatch.setattr(doctor, "library", lambda: None)
    monkeypatch.setattr(doctor, "cpu_flags", lambda: frozenset(flags.split()))
    monkeypatch.setenv("RADIXKV_CPU_VARIANT", variant)
    assert found("native code").found == "none"
    assert found("native code").advice.endswith(f": {advice}")


def test_the_model_cache_is_reported_with_what_it_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RADIXKV_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor, "stored_bytes", lambda: 3 << 29)
    assert found("model cache").found.startswith(f"{tmp_path}, 1.5 GiB used, ")


def test_a_path_is_printed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in square brackets used to be taken for a style, and was missing."""
    finding = doctor.Finding("model cache", "/data/[red]/models", "pip install 'radixkv[server]'")
    monkeypatch.setattr(doctor, "examine", lambda: [finding])
    shown = io.StringIO()
    doctor.report(Console(file=shown, width=160))
    assert finding.found in shown.getvalue()
    assert finding.advice in shown.getvalue()


def test_bandwidth_is_measured() -> None:
    assert read_bandwidth() > 0
    assert found("memory").found == "read at 12 GB/s"
