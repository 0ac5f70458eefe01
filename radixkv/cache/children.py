"""A node's children: found by their first block, and in the order of these blocks' bytes."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TypeVar

from sortedcontainers import SortedList

from radixkv.cache.tokens import TOKEN_BYTES, common_tokens

Child = TypeVar("Child")


class Children(MutableMapping[bytes, Child]):
    """Children by the bytes of their first block, ascending.

    A dictionary beside a sorted list, because every branch of the tree has one: a ``SortedDict`` takes eight times as long
    to make, and is 21 objects to Python's garbage collector.

    Attributes:
        by_key: the dictionary. `RadixTree.match` reads it directly, which saves a call per node on the path.
    """

    __slots__ = ("_keys", "by_key")

    def __init__(self) -> None:
        self.by_key: dict[bytes, Child] = {}
        self._keys: SortedList[bytes] = SortedList()

    def __getitem__(self, key: bytes) -> Child:
        return self.by_key[key]

    def __setitem__(self, key: bytes, child: Child) -> None:
        if key not in self.by_key:
            self._keys.add(key)
        self.by_key[key] = child

    def __delitem__(self, key: bytes) -> None:
        del self.by_key[key]
        self._keys.remove(key)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self.by_key)

    def starting_with(self, prefix: bytes, limit: int) -> Iterator[Child]:
        """The children whose first blocks begin with ``prefix``, the first ``limit`` of them in order."""
        first = self._keys.bisect_left(prefix)
        for key in self._keys.islice(first, first + limit):
            if not key.startswith(prefix):
                return
            yield self.by_key[key]

    def nearest(self, key: bytes) -> tuple[Child | None, int]:
        """The child whose first block shares the most first tokens with ``key``, and how many; None where none shares any."""
        best, longest = None, 0
        for neighbour in (self.before(key), self.at_or_after(key)):
            if neighbour is not None and (common := common_tokens(key, 0, neighbour)) > longest:
                best, longest = self.by_key[neighbour], common
        return best, longest

    def longest_prefix_of(self, key: bytes | bytearray) -> bytes | None:
        """The longest key that ``key`` begins with; None where it begins with none."""
        while (index := self._keys.bisect_right(key)) and not key.startswith(before := self._keys[index - 1]):
            # Any prefix of it sorts before this one, too, and begins as both of them do.
            key = key[: common_tokens(key, 0, before) * TOKEN_BYTES]
        return before if index else None

    def before(self, key: bytes | bytearray) -> bytes | None:
        """The greatest key below this one."""
        index = self._keys.bisect_left(key)
        return self._keys[index - 1] if index else None

    def at_or_after(self, key: bytes | bytearray) -> bytes | None:
        """The smallest key that is not below this one."""
        index = self._keys.bisect_left(key)
        return self._keys[index] if index < len(self._keys) else None
