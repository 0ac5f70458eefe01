"""The percentile that benches give beside the median."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def p99(values: Sequence[float]) -> float:
    """The 99th percentile of at least one value, interpolated between its two neighbours, as NumPy's default is."""
    return float(np.percentile(values, 99))
