"""Checks that several calls have in common. They raise an InvalidArgumentError that names the argument."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from radixkv.cache.errors import InvalidArgumentError


def is_number(value: Any) -> bool:
    """Whether a value is a number; Python's booleans, which count as 0 and 1, are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, of Python or numpy; Python's booleans are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_count(name: str, value: int, least: int) -> int:
    """``value``, a whole number of Python's or numpy's of at least ``least``, as a Python int; others are refused."""
    # The exact type first: this runs for every block that is allocated.
    if not (type(value) is int or is_whole(value)) or value < least:
        raise InvalidArgumentError(f"{name}: expected a whole number of at least {least}, got {value!r}")
    return int(value)


def check_seconds(name: str, value: float) -> None:
    """Refuse what is not a number of seconds."""
    if not (is_number(value) and value >= 0):
        raise InvalidArgumentError(f"{name}: expected a number of seconds of at least 0, got {value!r:.80}")


def check_clock(clock: Callable[[], float]) -> None:
    """Refuse a clock that cannot be called."""
    if not callable(clock):
        raise InvalidArgumentError(f"clock: expected a function that returns seconds, got {clock!r:.80}")


def check_path(name: str, path: Path) -> None:
    """Refuse what is not a `Path`."""
    if not isinstance(path, Path):
        raise InvalidArgumentError(f"{name}: expected a Path, got {path!r:.80}")


def check_namespace(namespace: str) -> None:
    """Refuse what is not a string of Unicode text: block hashes take its UTF-8."""
    if not isinstance(namespace, str):
        raise InvalidArgumentError(f"namespace: expected a string, got {namespace!r}")
    check_unicode("namespace", namespace)


def is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogate, see `check_unicode`."""
    return text.encode(errors="ignore").decode() == text


def check_unicode(name: str, text: str) -> None:
    """Refuse a lone surrogate, which JSON and process arguments can hold, and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"{name}: character {error.start} is half of a surrogate pair, not Unicode text"
        ) from error


def check_retention(priority: int, owner: str) -> None:
    """Refuse a retention priority that is not a whole number, and an owner that is not a string."""
    if not is_whole(priority):
        raise InvalidArgumentError(f"priority: expected a whole number, got {priority!r}")
    if not isinstance(owner, str):
        raise InvalidArgumentError(f"owner: expected a string, got {owner!r}")
