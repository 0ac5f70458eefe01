"""Threads that carry out jobs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

_log = logging.getLogger(__name__)


class Worker:
    """Runs what it is given, in order, until it is stopped.

    Its threads end with the process: a medium that hangs does not keep a process from its end.

    Args:
        name: of the threads.
        num_threads: so many jobs run at the same time; they begin in order.
    """

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job``; begin it after those before it."""
        self._jobs.put(job)

    def stop(self, timeout: float) -> bool:
        """Finish the jobs and end; returns whether that took no longer than ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                # What it was for notices that nothing came of it; the jobs behind it are others'.
                _log.exception("a job of %s failed", threading.current_thread().name)
            del job  # with what it holds, before the next one comes
