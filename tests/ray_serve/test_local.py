"""Which Ray a server runs on."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.ray import local
from radixkv.ray.options import PlacementConfig


def test_a_local_ray_is_not_one_that_runs_on_the_machine_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there was one, `radixkv serve --replicas` ended with an error of Ray's."""
    ray = pytest.importorskip("ray")
    addresses: list[Any] = []
    monkeypatch.setattr(ray, "init", lambda address=None, **_: addresses.append(address))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    for given in (None, "10.0.0.1:6379"):
        with local._ray(PlacementConfig(replicas=2, ray_address=given)):
            pass
    assert addresses == ["local", "10.0.0.1:6379"]
