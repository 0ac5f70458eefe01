"""Requests at random, some of whose prefixes are below the pool: all are served, and none waits for ever."""

from __future__ import annotations

import random

import pytest
from support.prefix_load_driver import SHORT_STEM, SIZE, STEM, Driver, unlike

from radixkv.scheduling.tenant_share import TenantShare

_NUM_PINNED = 5


@pytest.mark.parametrize("seed", range(12))
def test_all_that_fit_are_served_whatever_is_loaded_and_pinned(seed: int) -> None:
    """Two waited for each other, with nothing running: what each needed was left to the other."""
    rng = random.Random(seed)
    driver = Driver(rng.choice([2, 4, 16]), {"b": TenantShare(weight=2)}, max_overtaken=rng.choice([0, 1, 3]))
    pinned = driver.add(unlike(8000, _NUM_PINNED), max_new=1)
    driver.finish_running_and_waiting()
    driver.cache.pin(pinned.prefill_token_ids)
    num_added = num_idle = 0
    while num_added < 40 or driver.scheduler.running or driver.scheduler.waiting:
        if num_added < 40 and rng.random() < 0.5:
            num_added += 1
            stem = rng.choice([[], STEM, SHORT_STEM])
            stem = stem[: SIZE * rng.randint(0, len(stem) // SIZE)]
            own = unlike(10_000 + 400 * num_added, rng.randint(1, 90 - _NUM_PINNED - len(stem) // SIZE))
            namespace = rng.choice(["", str(num_added)])
            driver.add([*stem, *own], rng.choice([1, 4, 16]), rng.choice("abc"), namespace)
        is_idle = driver.step() == 0 and bool(driver.scheduler.waiting) and not driver.loads.in_progress
        num_idle = num_idle + 1 if is_idle else 0
        assert num_idle < 5
        assert not is_idle or driver.scheduler.admission.first_without_room is None  # the engine would fail that one
        driver.cache.check()
        if rng.random() < 0.3:
            driver.loader.finish_first()
