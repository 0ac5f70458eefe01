"""An ingress from its start to its first request: what may hang, and what may change, meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support.pretended_replicas import SECRET, Cluster

from radixkv.cluster import ReplicaSet, membership, replica_set
from radixkv.cluster import run as cluster_run
from radixkv.cluster.wire import encode_shares
from radixkv.config import ModelConfig
from radixkv.server.config import ServerConfig
from radixkv.server.keys import hash_of
from radixkv.server.tenants import Tenants


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster whose replicas an ingress finds by their urls."""
    cluster = Cluster()
    monkeypatch.setattr(replica_set, "_SECONDS_BETWEEN_ATTEMPTS", 0.0)
    monkeypatch.setattr(membership, "_SECONDS_BETWEEN_ATTEMPTS", 0.0)
    monkeypatch.setattr(membership, "_SECONDS_FOR_OTHERS", 0.0)
    monkeypatch.setattr(cluster_run, "ReplicaSet", lambda secret: cluster.replicas())
    return cluster


def started(monkeypatch: pytest.MonkeyPatch, config: ServerConfig, replicas_file: Path) -> tuple[list[str], Tenants]:
    """The replicas that are up when an ingress would take its first request, and who may use it."""
    found: list[tuple[list[str], Tenants]] = []

    def create(config: ServerConfig, replicas: ReplicaSet, *, tenants: Tenants, **_: Any) -> SimpleNamespace:
        found.append((replicas.available, tenants))
        return SimpleNamespace(llm=replicas)

    async def serve(*_: Any, **__: Any) -> int:
        return 0

    monkeypatch.setattr(cluster_run, "create_ingress", create)
    monkeypatch.setattr(cluster_run, "serve", serve)
    assert cluster_run.run_ingress(config, ModelConfig(), {}, replicas_file, SECRET) == 0
    return found[0]


def test_a_busy_replica_does_not_keep_an_ingress_from_starting(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It used to wait until each replica had confirmed the tenants' shares: two minutes for one that hung."""
    told: list[bytes] = []

    async def tell(request: httpx.Request) -> httpx.Response:
        if request.url.host == "busy":
            await asyncio.Event().wait()
        told.append(request.content)
        return httpx.Response(200)

    cluster.answers["/tenants"] = tell
    file = tmp_path / "replicas"
    file.write_text("a = http://a\nbusy = http://busy\n")
    available, tenants = started(monkeypatch, ServerConfig(port=0), file)
    assert available == ["a"]
    assert told == [encode_shares(tenants.shares)]


def test_files_are_read_again_while_an_ingress_waits_for_its_first_replica(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SIGHUP used to end it."""
    file, keys = tmp_path / "replicas", tmp_path / "keys.toml"
    file.write_text("gone = http://gone\n")
    keys.write_text(f'[keys.ann]\nsha256 = "{hash_of("a")}"\n')

    async def change(request: httpx.Request) -> httpx.Response:
        if request.url.host != "gone":
            return httpx.Response(200)
        file.write_text("a = http://a\n")
        keys.write_text(f'[keys.bob]\nsha256 = "{hash_of("b")}"\n')
        os.kill(os.getpid(), signal.SIGHUP)
        raise httpx.ConnectError("planted")

    cluster.answers["/tenants"] = change  # asked before it is up
    available, tenants = started(monkeypatch, ServerConfig(port=0, keys_file=keys), file)
    assert available == ["a"]
    assert tenants.by_api_key("bob")
