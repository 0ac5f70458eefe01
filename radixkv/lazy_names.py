"""Names of a package that are imported at first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package (PEP 562), for names whose modules import more than the rest of the package.

    Args:
        package: its name.
        modules: for each name, the module of the package that defines it; for a module, its own name.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{modules[name]}")
        return module if modules[name] == name else getattr(module, name)

    return get
