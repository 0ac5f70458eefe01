"""A module's constants, which all of its importers share, cannot be changed by one of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_DISPLAYS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
_MAKERS = frozenset({"dict", "list", "set", "sorted", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"})


def assignments(node: ast.AST) -> Iterator[ast.Assign | ast.AnnAssign]:
    """The assignments of a module, not of its functions and classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Assign | ast.AnnAssign):
            yield child
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from assignments(child)


def is_mutable(value: ast.expr | None) -> bool:
    makes = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in _MAKERS
    return makes or isinstance(value, _DISPLAYS)


def mutable_globals(source: str) -> list[str]:
    """The names of dictionaries, lists and sets; except ``__all__``, which type checkers want to be a list."""
    found = []
    for node in assignments(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if is_mutable(node.value) and names != ["__all__"]:
            found += names
    return found


def test_no_module_has_a_mutable_global() -> None:
    found = {
        f"{path.relative_to(_ROOT)}: {name}"
        for package in ("radixkv", "kernels")
        for path in (_ROOT / package).rglob("*.py")
        for name in mutable_globals(path.read_text())
    }
    assert not found, "expected a MappingProxyType, a tuple or a frozenset"


def test_every_kind_of_them_is_found() -> None:
    source = """
__all__ = ["A"]
A = B = {}
if A:
    C: dict[str, int] = {name: 1 for name in B}
D = sorted(A)
E = MappingProxyType({})
library.argtypes = []
def function():
    local = []
"""
    assert mutable_globals(source) == ["A", "B", "C", "D"]
