"""A medium that fails is left alone, longer each time."""

from __future__ import annotations

import logging

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
