"""What Python hands to the native code lies in memory as C++ reads it: nothing else would notice a field out of place."""

from __future__ import annotations

import ctypes
import importlib
import pkgutil
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import radixkv_cpu

_SOURCES = Path(radixkv_cpu.__file__).parent / "src"


def structures() -> Iterator[tuple[str, type[ctypes.Structure]]]:
    """Each structure with its name in C++, which its docstring gives."""
    for module in pkgutil.iter_modules(radixkv_cpu.__path__):
        if module.name.startswith("lib"):
            continue
        for each in vars(importlib.import_module(f"radixkv_cpu.{module.name}")).values():
            if isinstance(each, type) and issubclass(each, ctypes.Structure) and each is not ctypes.Structure:
                named = re.match(r"`(\w+)` of ``src/calls.h``", each.__doc__ or "")
                assert named, f"{each}: expected the name of its structure in src/calls.h"
                yield named[1], each


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the sources are for x86-64")
@pytest.mark.skipif(not shutil.which("g++"), reason="there is no compiler")
def test_every_structure_is_laid_out_as_in_c(tmp_path: Path) -> None:
    expected, lines = {}, []
    for name, structure in dict(structures()).items():
        expected[name] = ctypes.sizeof(structure)
        lines.append(f'std::printf("{name} %zu\\n", sizeof(radixkv::{name}));')
        for field, *_ in structure._fields_:
            expected[f"{name}.{field}"] = getattr(structure, field).offset
            lines.append(f'std::printf("{name}.{field} %zu\\n", offsetof(radixkv::{name}, {field}));')
    assert len(expected) > 100
    source, program = tmp_path / "layout.cpp", tmp_path / "layout"
    head = '#include <cstddef>\n#include <cstdio>\n#include "calls.h"\n'
    source.write_text(head + "int main() {\n" + "\n".join(lines) + "\n}\n")
    # As the sources are compiled for their oldest processor.
    options = ["-std=c++20", "-mavx2", "-mfma", "-mf16c", "-mbmi2", "-Wno-invalid-offsetof", "-I", str(_SOURCES)]
    subprocess.run(["g++", *options, str(source), "-o", str(program)], check=True)
    found = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    assert dict(line.rsplit(" ", 1) for line in found.splitlines()) == {n: str(at) for n, at in expected.items()}
