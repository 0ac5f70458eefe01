"""Aborts of requests that the engine does not have yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class EarlyAborts:
    """Which of the requests that are being tokenized, or prepared otherwise, were aborted meanwhile; for one event loop."""

    def __init__(self) -> None:
        self._preparing: Counter[str] = Counter()
        self._aborted: set[str] = set()

    @contextmanager
    def preparing(self, request_id: str | None) -> Iterator[None]:
        """A request is about to be tokenized and submitted under this id: from now on `abort` finds it."""
        if not isinstance(request_id, str):  # none was given, or one that `AsyncEngine.submit` refuses
            yield
            return
        self._preparing[request_id] += 1
        try:
            yield
        finally:
            self._preparing[request_id] -= 1
            if not self._preparing[request_id]:
                del self._preparing[request_id]
                self._aborted.discard(request_id)

    def abort(self, request_id: str) -> None:
        """Note that the request is aborted, if it is being prepared."""
        if request_id in self._preparing:
            self._aborted.add(request_id)

    def among(self, request_ids: Iterable[str]) -> set[str]:
        """Those that were aborted."""
        return self._aborted.intersection(request_ids)
