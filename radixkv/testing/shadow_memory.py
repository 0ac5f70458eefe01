"""A stand-in for keys and values: for every slot, the prefix that it was written for.

A token's key and value depend on all tokens before it, so a slot holds a tag that does too::

    tag of position p = hash(tag of position p - 1, token at p)        before the first: hash(namespace)

Two sequences have the same tag at a position exactly if they have the same prefix up to it, in the same namespace.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

Tags = NDArray[np.uint64]

_NEVER_WRITTEN = 0


def namespace_tag(namespace: str) -> int:
    """The tag before a sequence's first position."""
    return xxhash.xxh3_64_intdigest(namespace.encode(), seed=1)


def next_tags(tag: int, tokens: Sequence[int]) -> list[int]:
    """The tags of ``tokens`` that follow a position tagged ``tag``."""
    tags = []
    for token in tokens:
        tag = xxhash.xxh3_64_intdigest(tag.to_bytes(8, "little") + int(token).to_bytes(4, "little"))
        tags.append(tag)
    return tags


class ShadowMemory:
    """The tags in the slots of ``num_blocks`` blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._tags: Tags = np.full((num_blocks, block_size), _NEVER_WRITTEN, dtype=np.uint64)
        self._before: Tags = np.full((num_blocks, block_size), _NEVER_WRITTEN, dtype=np.uint64)

    def write(self, blocks: Sequence[int], position: int, before: int, tags: Sequence[int]) -> None:
        """Write the slots from ``position`` on of a sequence with these blocks.

        The later slots of the last block are lost: its only owner has not written them yet.

        Args:
            before: the tag of the position before.
        """
        for tag in tags:
            block, slot = blocks[position // self._block_size], position % self._block_size
            self._tags[block, slot:] = _NEVER_WRITTEN
            self._tags[block, slot] = tag
            self._before[block, slot] = before
            before = tag
            position += 1

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first slots of a block; the target's others are lost."""
        tags, before = self._tags[source, :num_tokens].copy(), self._before[source, :num_tokens].copy()
        self._tags[target] = _NEVER_WRITTEN
        self._tags[target, :num_tokens] = tags
        self._before[target, :num_tokens] = before

    def first_difference(self, blocks: Sequence[int], tags: Tags) -> int | None:
        """The first position at which a sequence with these blocks, which hold as many tokens, does not read its own tag."""
        num_blocks = -(-len(tags) // self._block_size)
        wrong = self._tags[list(blocks[:num_blocks])].reshape(-1)[: len(tags)] != tags
        return int(wrong.argmax()) if wrong.any() else None

    def tag(self, block: int, slot: int) -> int | None:
        """The tag in a slot; None if nothing was written there."""
        tag = int(self._tags[block, slot])
        return None if tag == _NEVER_WRITTEN else tag

    def full_block_tags(self, blocks: Sequence[int]) -> dict[int, int]:
        """Those of ``blocks`` whose slots were all written for one sequence, with the tag of their last slot."""
        ids = np.array(list(blocks), dtype=np.int64)
        joined = (self._before[ids][:, 1:] == self._tags[ids][:, :-1]).all(axis=1)
        full = ids[joined & (self._tags[ids] != _NEVER_WRITTEN).all(axis=1)]
        return dict(zip(full.tolist(), self._tags[full, -1].tolist(), strict=True))

    def tags_before(self, blocks: Sequence[int]) -> dict[int, int]:
        """Those of ``blocks`` in which something was written, with the tag before their first slot."""
        ids = np.array(list(blocks), dtype=np.int64)
        written = ids[self._tags[ids, 0] != _NEVER_WRITTEN]
        return dict(zip(written.tolist(), self._before[written, 0].tolist(), strict=True))
