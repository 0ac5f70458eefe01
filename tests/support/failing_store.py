"""A block store that refuses once."""

from __future__ import annotations

import pytest

from radixkv.cache import OutOfBlocks
from radixkv.cache.block_store import BlockStore


class FailingOnce:
    """Refuses the n-th request for blocks, counted from 1, or none for 0. Every allocation comes after such a request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
        self.num_calls = 0
        original = BlockStore.require

        def require(store: BlockStore, count: int) -> None:
            self.num_calls += 1
            if self.num_calls == fails_at:
                raise OutOfBlocks(count, 0, 0)
            original(store, count)

        monkeypatch.setattr(BlockStore, "require", require)
