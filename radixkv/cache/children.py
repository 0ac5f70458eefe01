"""A node's children: found by their first block, and in the order of these blocks' bytes."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TypeVar

from sortedcontainers import SortedList

Child = TypeVar("Child")


class Children(MutableMapping[bytes, Child]):
    """Children by the bytes of their first block, ascending.

    A dictionary beside a sorted list, for every branch of the tree has one: a ``SortedDict`` takes eight times as long to
    make, and is 21 objects to Python's garbage collector.
    """

    __slots__ = ("_by_key", "_keys")

    def __init__(self) -> None:
        self._by_key: dict[bytes, Child] = {}
        self._keys: SortedList[bytes] = SortedList()

    def __getitem__(self, key: bytes) -> Child:
        return self._by_key[key]

    def __setitem__(self, key: bytes, child: Child) -> None:
        if key not in self._by_key:
            self._keys.add(key)
        self._by_key[key] = child

    def __delitem__(self, key: bytes) -> None:
        del self._by_key[key]
        self._keys.remove(key)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, key: bytes) -> Child | None:
        """The child whose first block is ``key``."""
        return self._by_key.get(key)

    def before(self, key: bytes | bytearray) -> bytes | None:
        """The greatest key below this one."""
        place = self._keys.bisect_left(key)
        return self._keys[place - 1] if place else None

    def at_or_after(self, key: bytes | bytearray) -> bytes | None:
        """The least key that is not below this one."""
        place = self._keys.bisect_left(key)
        return self._keys[place] if place < len(self._keys) else None
