"""The compiled library is loaded if it is of the sources beside it, and shares torch's OpenMP runtime."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from radixkv_cpu.library import FOLDER, VARIANTS, Library, openmp_of_torch, supported_variants
from radixkv_cpu.source_digest import source_digest

DIGEST = source_digest(FOLDER / "src")


@pytest.mark.skipif(not supported_variants(), reason="no variant of the native code runs here")
@pytest.mark.parametrize(
    ("present", "changed", "named"),
    [(DIGEST, "0" * 16, "0" * 16), ("radixkv_sources", "radixkv_nothing", "others, which it does not name")],
    ids=["of other sources", "that names none"],
)
def test_library_of_other_sources(tmp_path: Path, present: str, changed: str, named: str) -> None:
    variant = supported_variants()[0]
    compiled = (FOLDER / f"libradixkv_cpu_{variant}.so").read_bytes()
    assert present.encode() in compiled
    stale = tmp_path / f"{changed}.so"  # of its own name: the loader knows a path that it has loaded
    stale.write_bytes(compiled.replace(present.encode(), changed.encode()))
    ctypes.CDLL(str(stale))  # it loads
    with pytest.raises(
        RuntimeError, match=rf"{changed}.so: expected .* {DIGEST} in .*, got one of {named}: compile it again"
    ):
        Library(variant, stale)


def predefined(*options: str) -> set[str]:
    """What the compiler defines, which tells the instructions that it may use."""
    command = ["g++", "-dM", "-E", "-x", "c++", *options, "/dev/null"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[1] for line in lines}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the sources are for x86-64")
@pytest.mark.skipif(not shutil.which("g++"), reason="there is no compiler")
@pytest.mark.parametrize(("variant", "level"), [("avx2", "x86-64-v3"), ("avx512", "x86-64-v4")])
def test_a_variant_needs_all_that_the_compiler_may_use(variant: str, level: str) -> None:
    """Not needed were the instructions that count leading zeros and reverse bytes, which are in what is compiled."""
    names = {"abm": "lzcnt", "bmi1": "bmi"}
    needed = [f"-m{names.get(flag, flag)}" for flag in VARIANTS[variant]]
    # Of every processor with AVX, for which Linux does not list them all.
    always = {"__XSAVE__", "__LAHF_SAHF__", "__GCC_HAVE_SYNC_COMPARE_AND_SWAP_16"}
    assert predefined(f"-march={level}") - predefined(*needed) <= always


def test_digest_depends_on_all_of_the_sources(tmp_path: Path) -> None:
    digests = [source_digest(tmp_path)]
    for name, text in [("a.h", ""), ("b.cpp", "int x;"), ("b.cpp", "int y;"), ("a.h", "int x;")]:
        (tmp_path / name).write_text(text)
        digests.append(source_digest(tmp_path))
    assert len({*digests}) == len(digests)
    (tmp_path / "notes.txt").write_text("nothing that is compiled")
    assert source_digest(tmp_path) == digests[-1]


def test_copies_of_the_openmp_runtime_that_other_packages_load_are_not_shared(tmp_path: Path) -> None:
    """The first in memory was, and the library's threads and torch's got in each other's way."""
    runtime = openmp_of_torch()
    assert runtime is not None, "torch is built without OpenMP"
    for i in range(3):
        ctypes.CDLL(shutil.copy(runtime, tmp_path / f"libgomp-{i}.so.1"))
    assert openmp_of_torch() == runtime
