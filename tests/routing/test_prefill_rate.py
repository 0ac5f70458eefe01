"""An engine's speed is that of steps that computed prompts, of late."""

from __future__ import annotations

import pytest

from radixkv.routing import PrefillRate


def test_steps_that_computed_little_of_prompts_say_nothing() -> None:
    rate = PrefillRate()
    rate.observe_step(0, 64, 0.1)
    rate.observe_step(31, 31, 0.1)
    rate.observe_step(100, 201, 0.1)
    assert rate.seconds_per_token is None
    rate.observe_step(32, 64, 0.032)
    assert rate.seconds_per_token == pytest.approx(1e-3)


def test_large_steps_count_more_and_old_ones_less() -> None:
    rate = PrefillRate()
    rate.observe_step(500, 500, 0.5)
    rate.observe_step(50, 50, 0.5)
    assert rate.seconds_per_token == pytest.approx((0.8 * 0.5 + 0.5) / (0.8 * 500 + 50))
    for _ in range(30):
        rate.observe_step(500, 500, 2.0)
    assert rate.seconds_per_token == pytest.approx(4e-3, rel=1e-2)
