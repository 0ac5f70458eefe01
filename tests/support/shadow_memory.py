"""What blocks hold and a tree knows, in the simplest way there is: to compare a cache with."""

from __future__ import annotations

from typing import Any

from radixkv.cache import BlockTable, NodeSnapshot


class ShadowMemory:
    """For every slot of every block, the namespace and the exact prefix whose last token was written there."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._slots: list[Any] = [None] * (num_blocks * block_size)

    def write(self, table: BlockTable, tokens: list[int], start: int) -> None:
        for position in range(start, len(tokens)):
            self._slots[self._slot(table, position)] = (table.namespace, tuple(tokens[: position + 1]))

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        a, b = source * self._block_size, target * self._block_size
        self._slots[b : b + num_tokens] = self._slots[a : a + num_tokens]

    def assert_reads_its_own(self, table: BlockTable, tokens: list[int]) -> None:
        for position in range(table.num_tokens):
            assert self._slots[self._slot(table, position)] == (table.namespace, tuple(tokens[: position + 1]))

    def _slot(self, table: BlockTable, position: int) -> int:
        return int(table.block_ids[position // self._block_size]) * self._block_size + position % self._block_size


def longest_known(root: NodeSnapshot | None, tokens: list[int]) -> int:
    """The longest prefix of ``tokens`` on any path of the tree, tried one by one."""
    if root is None:
        return 0
    best, pending = 0, [(root, [])]
    while pending:
        node, before = pending.pop()
        path = before + node.tokens.tolist()
        common = next((i for i, (a, b) in enumerate(zip(path, tokens, strict=False)) if a != b), None)
        best = max(best, min(len(path), len(tokens)) if common is None else common)
        pending.extend((child, path) for child in node.children)
    return best
