"""Checks of arguments that the machines and the search have in common."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any


def check_maker(name: str, make: Any, arguments: str) -> None:
    """Raise a TypeError unless ``make`` can be called, and is not an abstract class; ``arguments`` are for the message."""
    if not callable(make):
        raise TypeError(f"{name}: expected a class, or a function of {arguments}, got {make!r:.80}")
    if inspect.isabstract(make):
        missing = ", ".join(sorted(make.__abstractmethods__))
        raise TypeError(f"{name}: expected a class with all methods, got {make.__name__}, which has no {missing}")


def check_namespaces(namespaces: Sequence[str]) -> None:
    """Raise a TypeError unless these are strings, and a ValueError if there are none."""
    if isinstance(namespaces, str) or not isinstance(namespaces, Sequence):
        raise TypeError(f"namespaces: expected a list of strings, got {namespaces!r:.80}")
    for name in namespaces:
        if not isinstance(name, str):
            raise TypeError(f"namespaces: expected strings, got {name!r:.80}")
    if not namespaces:
        raise ValueError("namespaces: expected at least one, got none")
