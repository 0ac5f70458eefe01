"""Threads that carry out functions for others, and end with the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

_T = TypeVar("_T")


class DaemonThreads:
    """Like `concurrent.futures.ThreadPoolExecutor`, but a function that hangs does not keep a process from its end.

    Args:
        number: of threads.
        name: of the threads.
    """

    def __init__(self, number: int, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._shut_down = False
        for index in range(number):
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True).start()

    def submit(self, function: Callable[[], _T]) -> Future[_T]:
        """Run a function after those before it.

        Raises:
            RuntimeError: the threads were shut down.
        """
        future: Future[_T] = Future()
        with self._lock:
            if self._shut_down:
                raise RuntimeError("the threads were shut down")
            self._jobs.put((future, function))
        return future

    def shutdown(self) -> None:
        """Take no more functions, and do not wait for those that were taken; they are still run."""
        with self._lock:
            self._shut_down = True
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            carry_out(*job)
            del job  # with what it holds, before the next one comes
        self._jobs.put(None)  # for the next thread


def carry_out(future: Future[_T], function: Callable[[], _T]) -> None:
    """Have a future get what a function returns or raises, unless the future was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:  # handled where the result is awaited
        future.set_exception(error)
    else:
        future.set_result(result)
