"""Numbers of things in messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """A number and a noun: ``1 block``, ``1,200 blocks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
