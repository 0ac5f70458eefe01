"""What an adapter's methods return, checked: another type is a mistake in the adapter, and not a broken rule."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

from radixkv.testing.adapter import BlockCopy, CacheAdapter

_WHOLE = (int, np.integer)


def check_maker(name: str, make: Any, arguments: str) -> None:
    """Refuse what cannot make what is tested.

    Args:
        name: of the argument.
        make: its value.
        arguments: that it is called with, in parentheses.

    Raises:
        TypeError: it cannot be called, or is an abstract class.
    """
    if not callable(make):
        raise TypeError(f"{name}: expected a class, or a function of {arguments}, got {make!r:.80}")
    if inspect.isabstract(make):
        missing = ", ".join(sorted(make.__abstractmethods__))
        raise TypeError(f"{name}: expected a class with all methods, got {make.__name__}, which has no {missing}")


class Answers:
    """The answers of one adapter; numbers of numpy are taken, too.

    Raises:
        TypeError: an answer is of another type; the message names the method and what it must return.
    """

    def __init__(self, adapter: CacheAdapter) -> None:
        self._adapter = adapter

    def length(self, handle: Any) -> int:
        return self.whole("length", self._adapter.length(handle))

    def blocks(self, handle: Any) -> list[int]:
        return self._block_ids("blocks", self._adapter.blocks(handle))

    def free_blocks(self) -> list[int]:
        return self._block_ids("free_blocks", self._adapter.free_blocks())

    def cached_blocks(self) -> list[int]:
        return self._block_ids("cached_blocks", self._adapter.cached_blocks())

    def take_copies(self) -> list[BlockCopy]:
        copies = self._listed("take_copies", self._adapter.take_copies(), "BlockCopy objects")
        for copy in copies:
            if not isinstance(copy, BlockCopy):
                self._refuse("take_copies", "BlockCopy objects", copy)
        return copies

    def whole(self, method: str, answer: Any) -> int:
        """The answer of a method that counts tokens."""
        if not isinstance(answer, _WHOLE) or isinstance(answer, bool):
            self._refuse(method, "a whole number", answer)
        return int(answer)

    def truth(self, method: str, answer: Any) -> bool:
        """The answer of a method that says whether it could."""
        if not isinstance(answer, bool | np.bool_):
            self._refuse(method, "True or False", answer)
        return bool(answer)

    def _block_ids(self, method: str, answer: Any) -> list[int]:
        blocks = self._listed(method, answer, "block ids")
        for block in blocks:
            if not isinstance(block, _WHOLE):
                self._refuse(method, "block ids", block)
        return blocks

    def _listed(self, method: str, answer: Any, of: str) -> list[Any]:
        if not isinstance(answer, Iterable):
            self._refuse(method, of, answer)
        return list(answer)

    def _refuse(self, method: str, expected: str, answer: Any) -> NoReturn:
        raise TypeError(f"{type(self._adapter).__name__}.{method}: expected {expected}, got {answer!r:.80}")
