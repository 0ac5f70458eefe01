"""What a tier does: the one interface between the engine and every store of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.stats import StoreStats

BlockBytes = npt.NDArray[np.uint8]


@runtime_checkable
class Tier(Protocol):
    """Keeps the bytes of whole blocks by key. It may forget any of them at any time, but never returns wrong ones.

    All calls may come from any thread; none of them raises for what happens to the medium: a block that cannot be read is not
    there, and one that cannot be written is dropped. Both are counted.

    Attributes:
        medium: where the blocks are, as metrics and events name it: "host", "disk", "shared".
    """

    medium: str

    @property
    def stats(self) -> StoreStats:
        """What was hit, missed, written and lost so far."""

    def contains_prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many leading keys are there, as far as is known without reading blocks.

        A tier on this machine answers from memory. A shared one asks its server, within its time limit.
        """

    def get_many(self, keys: Sequence[BlockKey], out: BlockBytes) -> int:
        """Read leading blocks into the rows of ``out``.

        Args:
            keys: of consecutive blocks of one prefix.
            out: ``[len(keys), bytes of a block]``, contiguous.

        Returns:
            How many leading rows hold what was put, tokens and checksum compared; what other rows hold is undefined.
        """

    def put_many(self, keys: Sequence[BlockKey], blocks: BlockBytes) -> None:
        """Keep blocks; what is there already is not written again. Never waits for the medium: what is too much is dropped.

        Args:
            keys: one per row.
            blocks: ``[len(keys), bytes of a block]``, read-only. Whoever keeps them copies them before this returns: their
                memory is used for other blocks afterwards.
        """

    def clear(self, namespace: bytes | None = None) -> None:
        """Forget one namespace (see `BlockKey.namespace`), or everything."""

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until what was put before is kept or dropped.

        Args:
            timeout: seconds; None: as long as it takes.

        Returns:
            False if the time was not enough.
        """

    def close(self) -> None:
        """Write what is pending and give back what is held open."""


@runtime_checkable
class RecencyOrdered(Protocol):
    """What a tier may do besides: let the blocks make room that were not used for the longest time."""

    def mark_used(self, prefix: Sequence[BlockKey]) -> None:
        """A prefix was used now: what was read of it here, and what was not because it is nearer, too.

        Of its blocks the last make room first: without those before them, they are of no use.
        """


@runtime_checkable
class Borrower(Protocol):
    """What a tier may do besides: write blocks out of the memory of whoever has them, without a copy of its own."""

    def borrow_many(self, keys: Sequence[BlockKey], blocks: BlockBytes) -> None:
        """`Tier.put_many` of blocks that stay as they are until `Tier.flush` has returned True, or nothing refers to them.

        Args:
            keys: one per row.
            blocks: ``[len(keys), bytes of a block]``, read-only.
        """
