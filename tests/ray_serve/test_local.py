"""Which Ray a server runs on, and what it leaves there."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from radixkv.ray import local
from radixkv.ray.options import ApplicationOptions, PlacementConfig
from radixkv.server.config import ServerConfig


class Serve(ModuleType):
    """Ray Serve, with the applications that it is given."""

    def __init__(self, *applications: str, fails: Exception | None = None) -> None:
        super().__init__("ray.serve")
        self.applications = set(applications)
        self.deletion_fails = False
        self._fails = fails

    def status(self) -> Any:
        return SimpleNamespace(proxies={}, applications=set(self.applications))

    def start(self, **options: Any) -> None:
        pass

    def run(self, application: object, name: str, route_prefix: None) -> None:
        self.applications.add(name)
        if self._fails is not None:
            raise self._fails

    def delete(self, name: str, _blocking: bool) -> None:
        if self.deletion_fails:
            raise ConnectionError("Ray is gone")
        self.applications.remove(name)

    def shutdown(self) -> None:
        pass


Serving = Callable[..., int]


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Serving:
    """Serves in a cluster that is there, on a Serve of the test."""

    def run(serve: Serve, build: Callable[[object], object] = repr, wait: Callable[[], None] = lambda: None) -> int:
        ray = ModuleType("ray")
        ray.__dict__.update(serve=serve, init=lambda *_, **__: None, shutdown=lambda: None)
        application = ModuleType("radixkv.ray.application")
        application.__dict__.update(build=build)
        for module in (ray, serve, application):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(local, "_wait_for_signal", wait)
        monkeypatch.setattr(local, "start_logging", lambda: None)
        placement = PlacementConfig(replicas=1, ray_address="10.0.0.1:6379")
        return local.serve_replicas(ApplicationOptions(ServerConfig(model="model"), {}, placement, own_socket=True))

    return run


def refuse(*_: object) -> Any:
    raise RuntimeError("planted")


def test_an_application_that_runs_in_the_cluster_is_left_alone(serving: Serving) -> None:
    """A second server whose own application could not be built used to take the first one's out of service."""
    serve = Serve("radixkv", "other")
    with pytest.raises(ValueError, match="ray_address: expected a cluster without an application 'radixkv'"):
        serving(serve)
    assert serve.applications == {"radixkv", "other"}


def test_what_could_not_be_built_was_not_started(serving: Serving) -> None:
    serve = Serve("other")
    serve.deletion_fails = True  # there is nothing to delete
    with pytest.raises(RuntimeError, match="planted"):
        serving(serve, build=refuse)


def test_an_application_that_does_not_come_up_is_deleted_and_the_error_has_the_reason(serving: Serving) -> None:
    serve = Serve("other", fails=RuntimeError("no room"))
    with pytest.raises(ValueError, match="could not be started: no room"):
        serving(serve)
    assert serve.applications == {"other"}
    serve.deletion_fails = True
    with pytest.raises(ValueError, match="could not be started: no room"):
        serving(serve)


def test_sighup_does_not_end_it(serving: Serving) -> None:
    """SIGHUP used to end the application with all answers in progress."""
    before = signal.getsignal(signal.SIGHUP)
    assert serving(Serve(), wait=partial(signal.raise_signal, signal.SIGHUP)) == 0
    assert signal.getsignal(signal.SIGHUP) is before


def test_an_error_while_it_runs_is_not_one_of_starting(serving: Serving) -> None:
    serve = Serve()
    with pytest.raises(RuntimeError, match=r"^planted$"):
        serving(serve, wait=refuse)
    assert serve.applications == set()
    assert serving(serve) == 0
    assert serve.applications == set()


def test_a_local_ray_that_is_late_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine its processes used to miss Ray's 30 seconds, and the server ended with a traceback."""
    failures = [
        Exception("timed out"),
        Exception("timed out"),
        None,
        *[Exception("timed out")] * 3,
        RuntimeError("planted"),
    ]

    def init(*_: object, **__: object) -> None:
        failure = failures.pop(0)
        if failure is not None:
            raise failure

    ray = ModuleType("ray")
    ray.__dict__.update(init=init, shutdown=lambda: None, cluster_resources=dict)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with local._ray(PlacementConfig(replicas=2)):
        assert len(failures) == 4
    with pytest.raises(ConnectionError, match="a local Ray did not start in 3 attempts: timed out"):
        local._start_ray(PlacementConfig(replicas=2))
    with pytest.raises(RuntimeError, match="planted"):
        local._start_ray(PlacementConfig(replicas=2))


def test_a_local_ray_is_not_one_that_runs_on_the_machine_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one was running, `radixkv serve --replicas` used to end with an error of Ray's."""
    import ray

    addresses: list[Any] = []
    monkeypatch.setattr(ray, "init", lambda address=None, **_: addresses.append(address))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "cluster_resources", dict)
    for given in (None, "10.0.0.1:6379"):
        with local._ray(PlacementConfig(replicas=2, ray_address=given)):
            pass
    assert addresses == ["local", "10.0.0.1:6379"]


@pytest.mark.parametrize(("replicas", "num_gpus", "fits"), [(1, 1.0, True), (4, 0.5, True), (3, 1.0, False)])
def test_more_gpus_than_the_machine_has_are_refused(
    monkeypatch: pytest.MonkeyPatch, replicas: int, num_gpus: float, fits: bool
) -> None:
    """Ray used to wait for them, and the server said nothing."""
    ray = ModuleType("ray")
    ended: list[bool] = []
    ray.__dict__.update(
        init=lambda *_, **__: None, shutdown=lambda: ended.append(True), cluster_resources=lambda: {"GPU": 2.0}
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    placement = PlacementConfig(replicas=replicas, num_gpus=num_gpus)
    refused = pytest.raises(
        ValueError, match="num_gpus: 3 replicas with 1 each need 3, and Ray finds 2 on this machine"
    )
    with contextlib.nullcontext() if fits else refused, local._ray(placement):
        assert fits
    assert ended == [True]
