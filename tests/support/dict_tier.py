"""A tier in a dictionary, which fails on demand in every way that a tier may."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.stats import StoreStats
from radixkv.tiers.tier import BlockBytes

Fault = Literal["forgets", "is gone", "reads half", "finds too much", "returns a code", "writes nothing"]
FAULTS: tuple[Fault, ...] = get_args(Fault)


class DictTier:
    """Keeps everything, until it is told to fail.

    Args:
        on_read: called before blocks are read; a test may let the tier be slow here.
    """

    medium = "dict"

    def __init__(self, on_read: Callable[[], object] = lambda: None) -> None:
        self.blocks: dict[bytes, tuple[BlockKey, bytes]] = {}
        self.fault: Fault | None = None
        self.num_read = self.num_read_partly_filled = 0
        self.closed = False
        self._on_read = on_read

    @property
    def stats(self) -> StoreStats:
        return StoreStats(hit_blocks=self.num_read)

    def contains_prefix(self, keys: Sequence[BlockKey]) -> int:
        self._fail_if_gone()
        if self.fault == "finds too much":
            return len(keys)
        found = (key.digest in self.blocks for key in keys)
        return next((i for i, there in enumerate(found) if not there), len(keys))

    def get_many(self, keys: Sequence[BlockKey], out: BlockBytes) -> int:
        self._on_read()
        self._fail_if_gone()
        limit = len(keys) // 2 if self.fault == "reads half" else len(keys)
        if self.fault in ("forgets", "returns a code"):
            limit = 0
        count = 0
        for row, key in zip(out[:limit], keys, strict=False):
            if key.digest not in self.blocks:
                break
            stored, data = self.blocks[key.digest]
            assert stored == key
            row[:] = memoryview(data)
            count += 1
            self.num_read_partly_filled += not key.is_whole
        out[count:] = 99  # undefined
        self.num_read += count
        return -1 if self.fault == "returns a code" else count

    def put_many(self, keys: Sequence[BlockKey], blocks: BlockBytes) -> None:
        self._fail_if_gone()
        if self.fault != "writes nothing":
            for key, row in zip(keys, blocks, strict=True):
                # What is there already is the same, up to rounding; a shadow memory's is equal.
                self.blocks.setdefault(key.digest, (key, row.tobytes()))

    def clear(self, namespace: bytes | None = None) -> None:
        for digest in [d for d, (key, _) in self.blocks.items() if namespace in (None, key.namespace)]:
            del self.blocks[digest]

    def flush(self, timeout: float | None = None) -> bool:
        return True

    def close(self) -> None:
        self.closed = True

    def _fail_if_gone(self) -> None:
        if self.fault == "is gone":
            raise ConnectionError("the store is gone")


class SlowlyRead(DictTier):
    """Reads nothing until it may."""

    def __init__(self) -> None:
        super().__init__(self._wait)
        self.reads, self.may_read = threading.Event(), threading.Event()

    def _wait(self) -> None:
        self.reads.set()
        assert self.may_read.wait(600)


class SlowlyWritten(DictTier):
    """Writes nothing until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.puts, self.may_put = threading.Event(), threading.Event()

    def put_many(self, keys: Sequence[BlockKey], blocks: BlockBytes) -> None:
        self.puts.set()
        assert self.may_put.wait(600)
        super().put_many(keys, blocks)


class PartlyFilledDictTier(DictTier):
    """Keeps partly filled blocks, too."""

    def first_present(self, keys: Sequence[BlockKey]) -> int | None:
        self._fail_if_gone()
        if self.fault == "finds too much":
            return 0
        return next((i for i, key in enumerate(keys) if key.digest in self.blocks), None)
