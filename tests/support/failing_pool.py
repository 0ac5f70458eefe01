"""A block pool one of whose allocations fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from radixkv.cache import BlockPool, OutOfBlocks


class FailingOnce:
    """Lets the pool's n-th allocation fail, counted from 1; none for 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
        self.num_calls = 0
        self._fails_at = fails_at
        for name in ("allocate", "allocate_one"):
            monkeypatch.setattr(BlockPool, name, self._wrap(getattr(BlockPool, name)))
        self._inside = False

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def allocate(pool: BlockPool, *args: Any, **options: Any) -> Any:
            if self._inside:  # one method may call the other
                return original(pool, *args, **options)
            self.num_calls += 1
            if self.num_calls == self._fails_at:
                raise OutOfBlocks(1, 0, 0)
            self._inside = True
            try:
                return original(pool, *args, **options)
            finally:
                self._inside = False

        return allocate
