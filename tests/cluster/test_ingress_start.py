"""An ingress from its start to its first request, and at its end: what may hang, and what may change, meanwhile."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support.pretended_replicas import SECRET, Cluster, until
from support.replica_servers import local_replicas, tiny_llm

from radixkv import AsyncLLM
from radixkv.cluster import ReplicaSet, create_ingress, membership, replica_set
from radixkv.cluster import run as cluster_run
from radixkv.cluster.wire import encode_shares
from radixkv.config import ModelConfig
from radixkv.errors import ModelLoadError
from radixkv.sampling.grammar.compiler import GrammarCompiler
from radixkv.server.access.keys import hash_of
from radixkv.server.access.tenants import Tenants
from radixkv.server.config import ServerConfig


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
        return SimpleNamespace(llm=replicas, service=SimpleNamespace(model_name="it"))

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
    confirmed: list[bytes] = []

    async def confirm(request: httpx.Request) -> httpx.Response:
        if request.url.host == "busy":
            await asyncio.Event().wait()
        confirmed.append(request.content)
        return httpx.Response(200)

    cluster.answers["/tenants"] = confirm
    file = tmp_path / "replicas"
    file.write_text("a = http://a\nbusy = http://busy\n")
    available, tenants = started(monkeypatch, ServerConfig(port=0), file)
    assert available == ["a"]
    assert confirmed == [encode_shares(tenants.shares)]


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


def test_a_replica_logs_which_model_it_loads_before_it_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "radixkv")
    with pytest.raises(ModelLoadError):
        cluster_run.run_replica("/no/such/model", {}, f"unix:{tmp_path}/replica", SECRET, ServerConfig())
    assert caplog.messages == ["loading /no/such/model ..."]


async def confirm(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200)


def test_an_ingress_that_cannot_start_leaves_its_replicas(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were left only after it had served."""
    cluster.answers["/tenants"] = confirm

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("queue_timeout: planted")

    monkeypatch.setattr(cluster_run, "create_ingress", refuse)
    with pytest.raises(ValueError, match="queue_timeout: planted"):
        cluster_run.run_ingress(ServerConfig(port=0), ModelConfig(), {"a": "http://a"}, None, SECRET)
    assert all(client.is_closed for client in cluster.made)


def test_an_ingress_that_ends_reads_no_list_of_replicas(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What joined then was never disconnected."""
    cluster.answers["/tenants"] = confirm
    file = tmp_path / "replicas"
    file.write_text("a = http://a\n")
    close = ReplicaSet.close

    async def reload_and_close(replicas: ReplicaSet) -> None:
        file.write_text("late = http://late\n")
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: "SIGHUP" in caplog.text or len(cluster.made) > 1)
        await close(replicas)

    monkeypatch.setattr(ReplicaSet, "close", reload_and_close)
    with caplog.at_level(logging.INFO):
        started(monkeypatch, ServerConfig(port=0), file)
    assert len(cluster.made) == 1


@pytest.mark.parametrize("kind", ["ingress", "replica"])
def test_the_first_grammar_finds_its_vocabulary_ready(
    kind: str, default_tokenizer: Any, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stopped all streams of an ingress, and then of each replica, for a second."""
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))

    async def ingress() -> GrammarCompiler:
        async with local_replicas(tmp_path, tiny_llm(default_tokenizer)) as (replicas, _):
            model_config = ModelConfig(tokenizer=default_tokenizer)
            return create_ingress(ServerConfig(), replicas, model_config=model_config).llm.grammars

    def replica() -> GrammarCompiler:
        found: list[GrammarCompiler] = []

        async def serve(llm: AsyncLLM, *_: Any, **__: Any) -> int:
            found.extend([await llm.call(lambda engine: engine.grammars)] * len(frozen))
            await llm.shutdown()
            return 0

        monkeypatch.setattr(cluster_run, "serve", serve)
        model, socket = str(tiny_model_folder), f"unix:{tmp_path}/replica"
        assert cluster_run.run_replica(model, {"num_blocks": 20}, socket, SECRET, ServerConfig()) == 0
        return found[0]

    grammars = asyncio.run(ingress()) if kind == "ingress" else replica()
    assert grammars._tokenizer is not None


def test_what_cannot_be_known_here_is_refused_at_the_start() -> None:
    with pytest.raises(RuntimeError, match="there was no replica yet"):
        create_ingress(ServerConfig(), ReplicaSet(SECRET))
    with pytest.raises(ValueError, match=r"queue_timeout: .* use first_token_timeout"):
        create_ingress(ServerConfig(queue_timeout=1.0), ReplicaSet(SECRET))
