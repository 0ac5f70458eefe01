"""Whoever waits for the tokenizer's or the grammars' thread waits for a turn, not for all of another's work."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial

import pytest
from support.time_limit import HANGING

from radixkv.serving.fair_thread import FairThread


def test_parties_take_turns() -> None:
    """One client's thousand prompts used to be tokenized before the next client's one."""
    thread, order = FairThread("test"), list[str]()
    started, go = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        go.wait()

    thread.submit("", wait)
    started.wait()
    jobs = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
    futures = [thread.submit(job[0], lambda job=job: order.append(job)) for job in jobs]  # type: ignore[misc]
    assert futures[1].cancel()
    go.set()
    for future in futures:
        if not future.cancelled():
            future.result()
    assert order == ["a1", "b1", "c1", "b2", "a3", "a4"]
    thread.shutdown()


def test_errors_reach_who_waits_and_nobody_else() -> None:
    thread = FairThread("test")

    def fail(error: BaseException) -> None:
        raise error

    with pytest.raises(ZeroDivisionError):
        thread.submit("a", partial(fail, ZeroDivisionError())).result()
    # What is no `Exception`, such as a panic in Rust code, would pass by whoever handles errors.
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        thread.submit("a", partial(fail, KeyboardInterrupt())).result()
    assert thread.submit("a", lambda: 5).result() == 5
    thread.shutdown()
    with pytest.raises(RuntimeError):
        thread.submit("a", lambda: 5)


def test_a_function_that_hangs_does_not_keep_the_process_from_its_end() -> None:
    hang = (
        "import threading\n"
        "from radixkv.serving.fair_thread import FairThread\n"
        "started = threading.Event()\n"
        "thread = FairThread('test')\n"
        "thread.submit('a', lambda: (started.set(), threading.Event().wait()))\n"
        "started.wait()\n"
        "thread.shutdown()\n"
    )
    subprocess.run([sys.executable, "-c", hang], check=True, timeout=HANGING)
