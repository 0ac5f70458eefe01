"""Fields of the structures in which arguments are handed to the library; see ``src/calls.h``."""

from __future__ import annotations

import ctypes
from typing import Any

Field = tuple[str, Any]


def pointers(*names: str) -> tuple[Field, ...]:
    """Addresses."""
    return tuple((name, ctypes.c_void_p) for name in names)


def sizes(*names: str) -> tuple[Field, ...]:
    """Whole numbers of 64 bits."""
    return tuple((name, ctypes.c_int64) for name in names)


def floats(*names: str) -> tuple[Field, ...]:
    """Numbers in float32."""
    return tuple((name, ctypes.c_float) for name in names)
