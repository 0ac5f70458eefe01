"""The interface of a tier: the only one between the engine and every store of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.stats import StoreStats

BlockBytes = npt.NDArray[np.uint8]


def check_blocks(blocks: BlockBytes, num_blocks: int, block_bytes: int) -> None:
    """Check that there is one row of contiguous bytes per block.

    Raises:
        ValueError: they have another form.
    """
    expected = (num_blocks, block_bytes)
    if blocks.shape != expected or blocks.dtype != np.uint8 or not blocks.flags.c_contiguous:
        raise ValueError(f"blocks: expected contiguous bytes of shape {expected}, got {blocks.dtype} {blocks.shape}")


@runtime_checkable
class Tier(Protocol):
    """Keeps the bytes of whole blocks by key; partly filled ones only if it is a `PartlyFilledKeeper`.

    It may forget any of them at any time, but never returns wrong ones.

    All calls may come from any thread. None raises if the medium fails: a block that cannot be read is not there, and one
    that cannot be written is dropped. Both are counted.

    Attributes:
        medium: where the blocks are, as metrics and events name it: "host", "disk", "shared".
    """

    medium: str

    @property
    def stats(self) -> StoreStats:
        """What was hit, missed, written and lost so far."""

    def contains_prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many leading keys are there, as far as is known without reading blocks.

        A tier on this machine answers from memory. A shared one queries its server, within its time limit.
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
        """Keep blocks; those already there are not written again. Never waits for the medium: excess blocks are dropped.

        Args:
            keys: of consecutive blocks of one prefix, one per row.
            blocks: ``[len(keys), bytes of a block]``, read-only. The tier must copy those that it keeps before it returns:
                their memory is used for other blocks afterwards.
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
        """Write what is pending and release what is held open."""


@runtime_checkable
class RecencyOrdered(Protocol):
    """An optional ability of a tier: to evict the least recently used blocks."""

    def mark_used(self, prefix: Sequence[BlockKey]) -> None:
        """A prefix was used now, including blocks that were not read here because a nearer tier has them.

        Its last blocks are evicted first: without those before them, they are of no use.
        """


@runtime_checkable
class PartlyFilledKeeper(Protocol):
    """An optional ability of a tier: to keep the partly filled last blocks of prefixes as well.

    The last of the keys that `Tier`'s methods get may then be one that is not `BlockKey.is_whole`.
    """

    def first_present(self, keys: Sequence[BlockKey]) -> int | None:
        """The first of some keys that is there, as far as is known without reading blocks.

        Args:
            keys: alternatives for one partly filled block, the longest first: fewer than a block has tokens.

        Returns:
            Its index; None: none of them is there.
        """


@runtime_checkable
class Borrower(Protocol):
    """An optional ability of a tier: to write blocks straight from the caller's memory, without a copy of its own."""

    def borrow_many(self, keys: Sequence[BlockKey], blocks: BlockBytes) -> None:
        """`Tier.put_many` of blocks that do not change until `Tier.flush` has returned True, or nothing refers to them.

        Args:
            keys: one per row.
            blocks: ``[len(keys), bytes of a block]``, read-only.
        """
