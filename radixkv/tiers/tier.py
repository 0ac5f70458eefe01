"""What a tier does: the one interface between the engine and every store of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from radixkv.tiers.block_key import BlockKey

BlockBytes = npt.NDArray[np.uint8]


class Tier(Protocol):
    """Keeps the bytes of whole blocks by key. It may forget any of them at any time, but never returns wrong ones.

    All calls may come from any thread; none of them raises for what happens to the medium: a block that cannot be read is not
    there, and one that cannot be written is dropped. Both are counted.

    Attributes:
        medium: where the blocks are, as metrics and events name it: "host", "disk", "shared".
    """

    medium: str

    def contains_prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many leading keys are there, as far as is known without reading blocks."""

    def get_many(self, keys: Sequence[BlockKey], out: BlockBytes) -> int:
        """Read leading blocks into the rows of ``out``.

        Args:
            keys: of consecutive blocks of one prefix.
            out: ``[len(keys), bytes of a block]``, contiguous.

        Returns:
            How many leading rows hold what was put, tokens and checksum compared; what other rows hold is undefined.
        """

    def put_many(self, keys: Sequence[BlockKey], blocks: BlockBytes) -> None:
        """Keep blocks; what is there already is not written again.

        Args:
            keys: one per row.
            blocks: ``[len(keys), bytes of a block]``; not kept by reference.
        """

    def clear(self, namespace: bytes | None = None) -> None:
        """Forget one namespace (see `BlockKey.namespace`), or everything."""

    def close(self) -> None:
        """Write what is pending and give back what is held open."""
