"""One engine used by several threads, one at a time, and requests whose streams are dropped at any moment.

The garbage collector may end a stream in any thread: in one that has nothing to do with the engine, in one that writes its
tiers and holds their locks, or within another call of the engine. So ending a request there neither waits for the engine nor
changes one that is in use: the request is noted, and whoever uses the engine ends it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from radixkv.engine.engine import Engine
from radixkv.scheduling.request import Request
from radixkv.serving.interrupts import deferred_interrupt


class ExclusiveUse:
    """The use of an engine by the threads of one `LLM`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.RLock()  # reentrant, for calls within calls, and for the garbage collector
        self._in_use = False  # by the thread that holds the lock
        self._abandoned: deque[Request] = deque()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep all other threads from the engine.

        Raises:
            RuntimeError: an AsyncLLM runs it, or another process made it.
        """
        self._engine.check_process()
        try:
            with self._lock:
                if self._engine.thread not in (None, threading.current_thread()):
                    raise RuntimeError(
                        "this LLM was given to an AsyncLLM that runs: use that one, or await its shutdown first"
                    )
                was_in_use, self._in_use = self._in_use, True
                try:
                    yield
                finally:
                    self._in_use = was_in_use
        finally:
            self._end_abandoned_if_idle()

    def abandon(self, request: Request) -> None:
        """End a request whose output will not be read: now, or when the engine is free."""
        self._abandoned.append(request)
        self._end_abandoned_if_idle()

    def end_abandoned(self) -> None:
        """End the abandoned requests. Only within `hold`, and not within a step."""
        while self._abandoned:
            self.end(self._abandoned.popleft())

    def end(self, request: Request) -> None:
        """End a request, if it is unfinished. Only within `hold`, and not within a step."""
        # Its id alone is not enough: an AsyncLLM that runs the engine by now may have given it to a request of its own.
        if self._engine.unfinished_request(request.request_id) is request:
            self._engine.abort(request.request_id)

    def _end_abandoned_if_idle(self) -> None:
        # Whoever uses the engine looks once more after giving back the lock, so nothing that is noted meanwhile stays.
        while self._abandoned and not self._in_use:
            with deferred_interrupt():  # raised between taking the lock and what follows, Ctrl-C would leave it taken
                if not self._lock.acquire(blocking=False):
                    return
                try:
                    self._in_use = True
                    self.end_abandoned()
                finally:
                    self._in_use = False
                    self._lock.release()
