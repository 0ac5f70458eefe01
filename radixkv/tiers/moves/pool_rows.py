"""The view of a pool that moving blocks needs: its blocks as rows of bytes."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from radixkv.tiers.tier import BlockBytes


class PoolRows(Protocol):
    """A pool's blocks as bytes; `radixkv.memory.block_rows.BlockRows` is one.

    Attributes:
        nbytes: of a block.
        num_blocks: of the pool.
    """

    nbytes: int
    num_blocks: int

    def read(self, block_ids: NDArray[np.int32]) -> Any:
        """The bytes of blocks as they are now, to be given to `to_host`.

        Args:
            block_ids: int32 ``[blocks]``.

        Raises:
            MemoryError, RuntimeError: there is no memory for them.
        """

    def fence(self) -> object:
        """Mark what was launched so far; None where nothing keeps running after a call."""

    def to_host(self, data: Any, fence: Any) -> BlockBytes:
        """What `read` returned, as ``[blocks, nbytes]``; ``fence`` was made after that call.

        Any thread may call, once.
        """

    def erase_behind(self, row: BlockBytes, num_tokens: int) -> None:
        """Overwrite with zeros what a row of `to_host`, ``[nbytes]``, holds behind its first ``num_tokens`` tokens."""

    def release(self, data: Any) -> None:
        """End the use of what `read` returned, and of what `to_host` made of it. Any thread may call."""

    def prepare(self, block_ids: NDArray[np.int32]) -> None:
        """Prepare blocks that `write` will be given, without changing them. Any thread may call."""

    def write(self, block_ids: NDArray[np.int32], data: BlockBytes, fence: object) -> None:
        """Overwrite blocks that nothing uses except work launched before ``fence``. Any thread may call."""
