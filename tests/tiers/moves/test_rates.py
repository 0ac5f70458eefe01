"""When a prefix is loaded, and when it is computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from radixkv.routing import PrefillRate
from radixkv.tiers.moves.rates import Rates
from radixkv.tiers.stack import Span


def test_a_prefix_is_loaded_where_that_and_the_wait_for_it_take_no_longer_than_computing_it() -> None:
    prefill = SimpleNamespace(seconds_per_token=None)
    rates, spans = Rates(2, cast(PrefillRate, prefill)), [Span(0, 1, 5), Span(1, 5, 7)]
    rates.observe_load(0, 2, 0.5)
    assert rates.load_seconds(spans) is None
    assert rates.choose_loading(spans, 16, 100.0)  # nothing is known of the other tier
    rates.observe_load(1, 1, 1.0)
    assert rates.load_seconds(spans) == pytest.approx(3.0)
    assert rates.compute_seconds(16) is None
    assert rates.choose_loading(spans, 16, 100.0)
    prefill.seconds_per_token = 0.25
    assert rates.compute_seconds(16) == 4.0
    assert rates.choose_loading(spans, 16, 1.0)
    assert not rates.choose_loading(spans, 16, 1.5)
    assert rates.load_seconds(spans) == pytest.approx(3.0)  # that others are before it says nothing of the tiers
    prefill.seconds_per_token = 0.18
    num_computed = 0
    while not rates.choose_loading(spans, 16, 0.0):
        num_computed += 1
    assert 0 < num_computed < 5  # a tier that was slow is tried again
