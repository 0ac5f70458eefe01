"""A thread that carries out jobs one after the other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

_log = logging.getLogger(__name__)


class Worker:
    """Runs what it is given, in order, until it is stopped.

    Its thread ends with the process: a medium that hangs does not keep a process from its end.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job`` after those before it."""
        self._jobs.put(job)

    def stop(self, timeout: float) -> bool:
        """Finish the jobs and end; returns whether that took no longer than ``timeout`` seconds."""
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                # What it was for notices that nothing came of it; the jobs behind it are others'.
                _log.exception("a job of %s failed", self._thread.name)
            del job  # with what it holds, before the next one comes
