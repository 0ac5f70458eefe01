"""A 99th percentile is the same statistic in every bench."""

from __future__ import annotations

import pytest

from radixkv.bench.cluster import routing
from radixkv.bench.common.percentiles import p99


def test_the_99th_percentile_of_a_hundred_values_is_not_the_largest() -> None:
    """It was where servers are soaked and replicas chosen, though not where latencies are reported."""
    values = [float(value) for value in range(1, 101)]
    assert p99(values) == routing._row("", values).p99_us == pytest.approx(99.01)
    assert p99([7.0]) == 7.0
