"""A package's docstring names each of its modules, so that a reader finds where a thing lives."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent for root in ("radixkv", "kernels") for path in (ROOT / root).rglob("__init__.py"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.relative_to(ROOT).as_posix())
def test_the_map_of_a_package_names_what_is_in_it(package: Path) -> None:
    described = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    modules = {path.stem for path in package.glob("*.py")} | {
        path.parent.name for path in package.glob("*/__init__.py")
    }
    assert modules - {"__init__", "__main__"} - set(re.findall(r"\w+", described)) == set()
