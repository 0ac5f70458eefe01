"""`radixkv doctor` says what the machine offers and what is done with it."""

from __future__ import annotations

import io
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
    monkeypatch.setattr(doctor, "cpu_flags", lambda: frozenset({"avx512f", "avx2", "amx_bf16", "sse2"}))
    assert found("CPU").found.endswith("threads, AVX2, AVX-512, AMX")
    monkeypatch.setattr(doctor, "cpu_flags", frozenset)
    assert found("CPU").found.endswith("threads")


@pytest.mark.parametrize(("is_fast", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_the_variant_is_named_with_the_type_that_it_computes_in(
    is_fast: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "library", lambda: SimpleNamespace(variant="some", is_fast_in_bf16=is_fast))
    assert found("compiled code") == doctor.Finding("compiled code", f"some, {dtype}")


@pytest.mark.parametrize(
    ("flags", "variant", "advice"),
    [
        ("avx2 fma f16c bmi2", "", "install g++, then reinstall RadixKV"),
        ("sse2", "", "it is for x86-64 with AVX2 or later"),
        ("sse2", "none", "unset RADIXKV_CPU_VARIANT, which is none"),
    ],
)
def test_advice_on_missing_compiled_code_is_what_helps(
    flags: str, variant: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users who had switched the compiled code off, or had another processor, used to be told to reinstall it."""
    monkeypatch.setattr(doctor, "library", lambda: None)
    monkeypatch.setattr(doctor, "cpu_flags", lambda: frozenset(flags.split()))
    monkeypatch.setenv("RADIXKV_CPU_VARIANT", variant)
    assert found("compiled code").found == "none"
    assert found("compiled code").advice.endswith(f": {advice}")


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
