"""Loads from tiers: what is read is written into the pool at the same time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.loader import BlockLoader, Load
from radixkv.tiers.pool_rows import PoolRows
from radixkv.tiers.stack import Span, TierStack


class SlowRows(PoolRows):
    """Of a pool: a write ends when reading has failed, and notes whether the load was said to be done by then."""

    nbytes, num_blocks = 8, 64

    def __init__(self, load: Load, failed: threading.Event) -> None:
        self._load, self._failed = load, failed
        self.done_before_written: bool | None = None

    def prepare(self, block_ids: NDArray[np.int32]) -> None:
        pass

    def write(self, block_ids: NDArray[np.int32], data: NDArray[np.uint8], fence: object) -> None:
        self._failed.wait()
        self.done_before_written = self._load.done.wait(0.1)


class FailingStack:
    """Whose second read raises."""

    def __init__(self, failed: threading.Event) -> None:
        self._failed = failed
        self._num_reads = 0

    def read(self, span: Span, keys: Sequence[BlockKey], out: NDArray[np.uint8]) -> int:
        self._num_reads += 1
        if self._num_reads == 1:
            return len(out)
        self._failed.set()
        raise RuntimeError("a defect")


def test_a_load_is_not_done_while_a_chunk_of_it_is_written() -> None:
    """Else its blocks, and the buffer that is copied from, would be used again meanwhile."""
    failed = threading.Event()
    load = Load([], [Span(0, 0, 32)], 0, np.arange(32, dtype=np.int32))
    rows = SlowRows(load, failed)
    stack = cast(TierStack, FailingStack(failed))
    nothing = cast(Any, None)
    loader = BlockLoader(stack, nothing, nothing, rows, lambda count, nbytes: np.zeros((count, nbytes), np.uint8))
    loader.load(load)
    assert load.done.wait(60)
    assert rows.done_before_written is False
    assert loader.stop(60)
