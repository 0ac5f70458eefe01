"""One thread that works for several parties in turns."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from radixkv.threads import FutureThreads, carry_out

_T = TypeVar("_T")


class FairThread:
    """Runs functions one after the other, one of each party in turn, so that no party waits for all functions of another.

    The thread ends with the process, whatever it runs.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._thread = FutureThreads(name)
        self._lock = threading.Lock()
        # The functions of each party; the party that comes first is the next.
        self._waiting: dict[str, deque[tuple[Callable[[], Any], Future[Any]]]] = {}

    def submit(self, party: str, function: Callable[[], _T]) -> Future[_T]:
        """Run a function when its turn comes, unless its future is cancelled by then.

        Raises:
            RuntimeError: the thread was shut down.
        """
        future: Future[_T] = Future()
        with self._lock:
            self._thread.submit(self._run_next)
            self._waiting.setdefault(party, deque()).append((function, future))
        return future

    def shutdown(self) -> None:
        """Take no more functions; those that wait are still run."""
        self._thread.shutdown()

    def _run_next(self) -> None:
        with self._lock:
            party = next(iter(self._waiting))
            functions = self._waiting.pop(party)
            function, future = functions.popleft()
            if functions:
                self._waiting[party] = functions
        carry_out(future, function)
