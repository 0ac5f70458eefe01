"""A medium that fails is left alone, longer each time."""

from __future__ import annotations

import logging
import threading

import pytest
from support.tier_model import FakeClock

from radixkv.tiers.backoff import Backoff


def test_waits_double_up_to_a_minute_and_each_outage_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    backoff = Backoff("the disk", clock)
    for _ in range(2):
        caplog.clear()
        for seconds in (1, 2, 4, 8, 16, 32, 60, 60):
            assert backoff.ready
            backoff.failed(OSError("unreadable"))
            backoff.failed(OSError("of a call that began before"))
            clock.now += seconds - 0.1
            assert not backoff.ready
            clock.now += 0.1
        with caplog.at_level(logging.WARNING):
            assert [record.getMessage()[:20] for record in caplog.records] == ["the disk: unreadable"]
            backoff.worked()
            backoff.worked()
            assert [record.getMessage() for record in caplog.records[1:]] == ["the disk: works again"]


def test_failures_in_two_threads_at_once_are_one_outage(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one used to be warned of, too, and doubled the time."""
    clock = FakeClock()
    backoff = Backoff("the disk", clock)
    others = [OSError("in another thread")]

    def fail_in_another_thread(record: logging.LogRecord) -> bool:
        if others:
            thread = threading.Thread(target=backoff.failed, args=[others.pop()])
            thread.start()
            thread.join()
        return True

    monkeypatch.setattr(logging.getLogger("radixkv.tiers.backoff"), "filters", [fail_in_another_thread])
    backoff.failed(OSError("unreadable"))
    assert not others
    assert [message[:20] for message in caplog.messages] == ["the disk: unreadable"]
    clock.now += 1
    assert backoff.ready
