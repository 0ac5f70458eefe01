"""Checks of what an adapter's methods return: an impossible answer is a mistake in the adapter, not a broken rule."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np

from radixkv.cache.arguments import is_whole
from radixkv.testing.adapter import BlockCopy, CacheAdapter


def check_maker(name: str, make: Any, arguments: str) -> None:
    """Refuse a maker that cannot make the object under test.

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


def check_namespaces(namespaces: Sequence[str]) -> None:
    """Refuse what names no namespace.

    Raises:
        TypeError: they are not a sequence of strings.
        ValueError: there are none.
    """
    if isinstance(namespaces, str) or not isinstance(namespaces, Sequence):
        raise TypeError(f"namespaces: expected a list of strings, got {namespaces!r:.80}")
    for name in namespaces:
        if not isinstance(name, str):
            raise TypeError(f"namespaces: expected strings, got {name!r:.80}")
    if not namespaces:
        raise ValueError("namespaces: expected at least one, got none")


class Answers:
    """The answers of one adapter, with numpy's numbers accepted too.

    Raises:
        TypeError: it is no `CacheAdapter`, or an answer has a wrong type; the message names the method and the right type.
        ValueError: likewise, where an answer is out of range.
    """

    def __init__(self, adapter: CacheAdapter) -> None:
        if not isinstance(adapter, CacheAdapter):
            raise TypeError(f"adapter: expected a CacheAdapter, got {adapter!r:.80}")
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
        method = "take_copies"
        copies = self._listed(method, self._adapter.take_copies(), "BlockCopy objects")
        for copy in copies:
            if not isinstance(copy, BlockCopy):
                self._refuse(method, "BlockCopy objects", copy)
            self._block_ids(method, (copy.source, copy.target))
            if not 0 <= self.whole(method, copy.num_tokens) <= self._adapter.block_size:
                self._refuse(method, f"copies of at most {self._adapter.block_size} tokens", copy, ValueError)
        return copies

    def ref_counts(self) -> list[int] | None:
        answer = self._adapter.ref_counts()
        if answer is None:
            return None
        counts = [self.whole("ref_counts", count) for count in self._listed("ref_counts", answer, "numbers or None")]
        if len(counts) != self._adapter.num_blocks:
            self._refuse("ref_counts", f"{self._adapter.num_blocks} numbers, one per block", counts, ValueError)
        return counts

    def known_sequences(self, namespace: str) -> list[Sequence[int]] | None:
        answer, of = self._adapter.known_sequences(namespace), "sequences of tokens or None"
        if answer is None:
            return None
        sequences = self._listed("known_sequences", answer, of)
        for sequence in sequences:
            if not isinstance(sequence, Sequence | np.ndarray):
                self._refuse("known_sequences", of, sequence)
        return sequences

    def whole(self, method: str, answer: Any) -> int:
        """The answer of a method that counts, or one of its numbers."""
        if not is_whole(answer):
            self._refuse(method, "a whole number", answer)
        return int(answer)

    def truth(self, method: str, answer: Any) -> bool:
        """The answer of a method that says whether it succeeded."""
        if not isinstance(answer, bool | np.bool_):
            self._refuse(method, "True or False", answer)
        return bool(answer)

    def _block_ids(self, method: str, answer: Any) -> list[int]:
        blocks = self._listed(method, answer, "block ids")
        for block in blocks:
            if not is_whole(block):
                self._refuse(method, "block ids", block)
            if not 0 <= block < self._adapter.num_blocks:
                self._refuse(method, f"block ids from 0 to {self._adapter.num_blocks - 1}", block, ValueError)
        return blocks

    def _listed(self, method: str, answer: Any, of: str) -> list[Any]:
        if not isinstance(answer, Iterable):
            self._refuse(method, of, answer)
        return list(answer)

    def _refuse(self, method: str, expected: str, answer: Any, error: type[Exception] = TypeError) -> NoReturn:
        raise error(f"{type(self._adapter).__name__}.{method}: expected {expected}, got {answer!r:.80}")
