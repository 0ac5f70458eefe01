"""Names of a package that are imported at first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from radixkv.extras import needing_extra


def lazy_names(
    package: str, modules: Mapping[str, str], extra: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package (PEP 562), for names whose modules import more than the rest of it.

    Args:
        package: its name.
        modules: for each name, the module of the package that defines it; for a module, its own name.
        extra: the one of RadixKV that brings what some of them import; None: all is there.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with nullcontext() if extra is None else needing_extra(extra, name):
            module = importlib.import_module(f"{package}.{modules[name]}")
        return module if modules[name] == name else getattr(module, name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get, names
