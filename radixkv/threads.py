"""Daemon threads that run jobs: one that hangs does not keep the process from exiting. And how threads call an event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

_T = TypeVar("_T")

# Of address space: only what is used of it is memory.
_DEEP_STACK_BYTES = 512 * 2**20
_stack_size = threading.Lock()  # of threads that are started, which is a setting of the process

_log = logging.getLogger(__name__)


class WorkerThread(threading.Thread):
    """A daemon thread that works in the background, and for whose end others wait."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)


class Worker:
    """Runs what it is given, in order, until it is stopped.

    Args:
        num_threads: so many jobs run at the same time; they begin in order.
    """

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [WorkerThread(self._run, name) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue ``job``; jobs begin in the order in which they were submitted."""
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
                # Whoever needs its result notices that there is none; the jobs behind it belong to others.
                _log.exception("a job of %s failed", threading.current_thread().name)
            del job  # releases what it holds while this thread waits for the next one


def run_outside_workers(job: Callable[[], None]) -> None:
    """Run a job that waits for workers: at once, or, where this is a `WorkerThread`, in a new thread.

    The garbage collector may call this in any thread, and a worker cannot wait for its own end. The new thread is no daemon:
    the process ends after the job.
    """
    if isinstance(threading.current_thread(), WorkerThread):
        threading.Thread(target=job, name="radixkv-closing").start()
    else:
        job()


class FutureThreads:
    """A `Worker` that returns futures, as `concurrent.futures.ThreadPoolExecutor` does."""

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._worker = Worker(name, num_threads)
        self._lock = threading.Lock()
        self._shut_down = False

    def submit(self, function: Callable[[], _T]) -> Future[_T]:
        """Queue a function; functions begin in the order in which they were submitted.

        Raises:
            RuntimeError: the threads were shut down.
        """
        future: Future[_T] = Future()
        with self._lock:
            if self._shut_down:
                raise RuntimeError("the threads were shut down")
            self._worker.submit(partial(carry_out, future, function))
        return future

    def shutdown(self) -> None:
        """Accept no more functions, and return without waiting for those already accepted, which still run."""
        with self._lock:
            self._shut_down = True
            self._worker.stop(0.0)


def carry_out(future: Future[_T], function: Callable[[], _T]) -> None:
    """Run a function and give a future what it returns or, as an `Exception`, raises; do nothing if it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:  # handled where the result is awaited
        future.set_exception(as_exception(error))
    else:
        future.set_result(result)


def as_exception(error: BaseException) -> Exception:
    """The error itself or, where it is no `Exception`, a `RuntimeError` with it as its cause.

    For callers that wait for a result and handle no other errors. Panics of Rust code (tokenizers, grammars) reach Python as
    a `BaseException`.
    """
    if isinstance(error, Exception):
        return error
    interrupted = RuntimeError(f"interrupted: {error!r}")
    interrupted.__cause__ = error
    return interrupted


def run_with_deep_stack(function: Callable[[], _T]) -> _T:
    """Run a function in a thread of its own, for recursion that would overflow the stack of others.

    A stack that overflows in compiled code ends the process.

    Raises:
        Exception: what the function raises.
    """
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    with _stack_size:
        before = threading.stack_size(_DEEP_STACK_BYTES)
        try:
            WorkerThread(run, "radixkv-deep-stack").start()
        finally:
            threading.stack_size(before)
    return future.result()


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """Have an event loop call a function soon, from any thread. Where it is closed, nothing is called."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        if not loop.is_closed():
            raise
