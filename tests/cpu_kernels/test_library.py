"""A library that was compiled from other sources is refused when it is loaded."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from radixkv_cpu.library import FOLDER, Library, supported_variants
from radixkv_cpu.source_digest import source_digest

DIGEST = source_digest(FOLDER / "src")


@pytest.mark.skipif(not supported_variants(), reason="no variant of the compiled code runs here")
@pytest.mark.parametrize(
    ("present", "changed", "named"),
    [(DIGEST, "0" * 16, "0" * 16), ("radixkv_sources", "radixkv_nothing", "others, which it does not name")],
    ids=["of other sources", "that names none"],
)
def test_library_of_other_sources(tmp_path: Path, present: str, changed: str, named: str) -> None:
    variant = supported_variants()[0]
    compiled = (FOLDER / f"libradixkv_cpu_{variant}.so").read_bytes()
    assert present.encode() in compiled
    stale = tmp_path / "stale.so"
    stale.write_bytes(compiled.replace(present.encode(), changed.encode()))
    ctypes.CDLL(str(stale))  # it loads
    with pytest.raises(
        RuntimeError, match=rf"stale.so: expected .* {DIGEST} in .*, got one of {named}: compile it again"
    ):
        Library(variant, stale)


def test_digest_depends_on_all_of_the_sources(tmp_path: Path) -> None:
    digests = [source_digest(tmp_path)]
    for name, text in [("a.h", ""), ("b.cpp", "int x;"), ("b.cpp", "int y;"), ("a.h", "int x;")]:
        (tmp_path / name).write_text(text)
        digests.append(source_digest(tmp_path))
    assert len({*digests}) == len(digests)
    (tmp_path / "notes.txt").write_text("nothing that is compiled")
    assert source_digest(tmp_path) == digests[-1]
