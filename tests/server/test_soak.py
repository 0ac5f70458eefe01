"""A few seconds of `radixkv bench soak-server`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from support.server_process import ADMIN_KEY, MODEL, TENANT_A, TENANT_B, ServerProcess

from radixkv.bench.serving import soak as soak_server
from radixkv.bench.serving.attacks import measure_attacks
from radixkv.bench.serving.hostile import HostileClient
from radixkv.bench.serving.soak import ServerSoak, Target, soak


@pytest.fixture(scope="module")
def server(tiny_model_folder: Path) -> Iterator[ServerProcess]:
    keys = ("--api-key", TENANT_A, "--api-key", TENANT_B)
    with ServerProcess(str(tiny_model_folder), "--served-model-name", MODEL, *keys, "--num-blocks", "2000") as server:
        yield server


@pytest.fixture(autouse=True)
def short_full_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_server, "_NUM_FULL_STEPS", 1)
    monkeypatch.setattr(soak_server, "_FULL_STEP_WORDS", 16)


def run(server: ServerProcess, seconds: float, bound: float) -> ServerSoak:
    log = Path(os.devnull)
    target = Target(server.url, server.process.pid, log, TENANT_A, TENANT_B, ADMIN_KEY)
    return asyncio.run(soak(target, seconds, seed=1, max_wait=bound, max_stall=bound, patience=1.0))


def test_normal_clients_get_their_answers(server: ServerProcess) -> None:
    result = run(server, 1.0, 600.0)
    assert not [failure for failure in result.failures if " grows: " not in failure]
    assert min(result.open_files) > 3
    assert min(result.metrics) > 20
    # Of every client at least one, however busy the machine.
    assert result.answered >= 3
    assert result.attacks.total() >= 6
    assert len(result.waits) == result.answered


def test_a_full_step_takes_some_time_however_short_it_is(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is a divisor, and a small model's step can take less than the kernel counts."""
    monkeypatch.setattr(soak_server, "_NUM_HOSTILE", 0)
    monkeypatch.setattr(soak_server, "processor_seconds", lambda pid: 0.0)
    result = run(server, 0.0, -1.0)
    assert result.full_step > 0
    assert result.failures[0].startswith("the first token took 0.00 s")


def test_what_takes_too_long_is_a_failure(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_server, "_NUM_HOSTILE", 0)
    failures = run(server, 0.0, -1.0).failures
    assert any(failure.startswith("the first token took") for failure in failures)
    assert any(failure.startswith("/health took") for failure in failures)


@pytest.mark.parametrize("name", ["rss", "open_files", "metrics", "log_bytes"])
def test_what_grows_is_a_failure(name: str) -> None:
    """Only memory was watched."""
    steady = {"rss": [1000.0] * 40, "open_files": [30, 60] * 20, "metrics": [200] * 40, "log_bytes": [0] * 40}
    assert not list(ServerSoak(**steady).growth())
    grown = {**steady, name: [1000 * number for number in range(40)]}
    (failure,) = ServerSoak(**grown).growth()
    assert failure.startswith(f"{name} grows: [0, 2000, 4000")


def test_each_attack_is_measured_by_itself(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostileClient, "attacks", property(lambda client: {"deep JSON": client.deep_json}))

    alone, attacked = asyncio.run(measure_attacks(server.url, TENANT_A, TENANT_B, 0.0))
    assert (alone.attack, alone.outcomes) == ("nobody attacks", {})
    assert (attacked.attack, attacked.outcomes) == ("deep JSON", {"400": 1})
    for cost in (alone, attacked):
        assert cost.failed == 0
        assert min(cost.first_token, cost.health) > 0
        assert json.dumps(asdict(cost))  # it is written into a file
