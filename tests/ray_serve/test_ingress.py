"""The public server under Ray Serve, without Ray: its options, and when Serve is to replace it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support.pretended_replicas import GREEDY, SECRET, Cluster, line, llm_of, streaming, until

import radixkv.cluster
from radixkv.cluster import ingress as cluster_ingress
from radixkv.cluster import membership
from radixkv.config import ModelConfig
from radixkv.engine.clearing import ALL_NAMESPACES
from radixkv.prompts import Prompt
from radixkv.ray import ingress as ray_ingress
from radixkv.ray.application import build
from radixkv.ray.ingress import ListeningIngress, _IngressDeployment
from radixkv.ray.options import ApplicationOptions
from radixkv.ray.registry import Listing
from radixkv.server.access.keys import hash_of
from radixkv.server.config import ServerConfig
from radixkv.server.run import namespaces_secret


async def test_serve_replaces_an_ingress_that_was_drained_when_it_has_answered_everything() -> None:
    """It was healthy to Serve, and refused all requests until it was restarted."""
    cluster, end = Cluster(), asyncio.Event()

    async def body() -> Any:
        yield line(1)
        await end.wait()
        yield line(1, "length")

    cluster.answers["/generate"] = streaming(body)
    replicas = await cluster.up("a")
    ingress = _IngressDeployment.__new__(_IngressDeployment)
    ingress._tasks, ingress._llm = [], llm_of(replicas)
    ingress._membership = SimpleNamespace(is_outdated=False)
    (stream,) = await ingress._llm.submit([Prompt([1])], GREEDY)
    with ingress._llm.coming_in():
        ingress._llm.start_draining()
        await ingress.check_health()
        end.set()
        assert [delta async for delta in stream][-1].finished
        await ingress.check_health()  # another one is still being tokenized
    with pytest.raises(RuntimeError, match="drained"):
        await ingress.check_health()
    await replicas.close()


class Registry:
    """What an ingress under Ray asks, and the replicas that it finds there."""

    def __init__(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        self.listing = Listing({"a": "http://a"}, complete=True)
        cluster.answers["/tenants"] = confirm

        async def secret(registry: Any) -> str:
            return SECRET

        async def answer_of(call: Any) -> Listing:
            return self.listing

        monkeypatch.setattr(ray_ingress, "forgo_torch", lambda: None)
        monkeypatch.setattr(ray_ingress, "shared_secret", secret)
        monkeypatch.setattr(ray_ingress, "answer_of", answer_of)
        monkeypatch.setattr(ray_ingress, "RENEWAL_SECONDS", 0.0)
        monkeypatch.setattr(ray_ingress, "_SECONDS_BETWEEN_LOOKS", 0.0)
        monkeypatch.setattr(membership, "_SECONDS_BETWEEN_ATTEMPTS", 0.0)
        monkeypatch.setattr(radixkv.cluster, "ReplicaSet", lambda secret: cluster.replicas())
        monkeypatch.setattr(
            cluster_ingress, "create_ingress", lambda _, replicas, **__: SimpleNamespace(llm=llm_of(replicas))
        )

    async def ingress(self, server: ServerConfig) -> _IngressDeployment:
        """An ingress that can take requests."""
        handle: Any = SimpleNamespace(listing=SimpleNamespace(remote=lambda: None))
        ingress = _IngressDeployment.__new__(_IngressDeployment)
        await ingress.__init__(handle, handle, server, ModelConfig(), None)  # type: ignore[misc]
        return ingress


async def confirm(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200)


def test_keys_that_change_while_an_ingress_waits_for_its_first_replica_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They were read at the next change, since the file was first looked at when a replica was up."""
    keys, cluster = tmp_path / "keys.toml", Cluster()
    keys.write_text(f'[keys.ann]\nsha256 = "{hash_of("a")}"\n')
    registry = Registry(cluster, monkeypatch)

    async def change(request: httpx.Request) -> httpx.Response:  # asked before it is up
        if "robert" not in keys.read_text():
            keys.write_text(f'[keys.robert]\nsha256 = "{hash_of("b")}"\n')
        return httpx.Response(200)

    cluster.answers["/tenants"] = change

    async def main() -> None:
        ingress = await registry.ingress(ServerConfig(keys_file=keys))
        await until(lambda: "keys read from" in caplog.text)
        assert ingress._tenants.by_api_key("b")
        await ingress._end()

    with caplog.at_level(logging.INFO, "radixkv"):
        asyncio.run(main())


async def test_an_ingress_follows_the_registry_until_only_replicas_that_it_refuses_are_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Serve then starts another one, which takes those."""
    cluster = Cluster()
    cluster.identities["http://other"] = {"block_size": 8}
    registry = Registry(cluster, monkeypatch)
    ingress = await registry.ingress(ServerConfig())
    replicas = ingress._llm.replicas
    assert replicas.available == ["a"]
    registry.listing = Listing({"a": "http://a", "other": "http://other"}, complete=True)
    await until(lambda: "block_size: 16, and 8 there" in caplog.text)
    await ingress.check_health()
    registry.listing = Listing({"other": "http://other"}, complete=False)  # "a" may just not have reported yet
    await until(lambda: len(cluster.made) > 5)
    assert replicas.available == ["a"]
    registry.listing = Listing({"other": "http://other"}, complete=True)
    await until(lambda: not replicas.available)
    with pytest.raises(RuntimeError, match="the replicas run something else now"):
        await ingress.check_health()
    await ingress._end()
    assert all(client.is_closed for client in cluster.made)


async def test_a_replica_that_goes_while_it_joins_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as down for two more minutes, in which nothing could be cleared."""
    cluster = Cluster()
    cluster.hung.add("http://b")
    registry = Registry(cluster, monkeypatch)
    ingress = await registry.ingress(ServerConfig())
    registry.listing = Listing({"a": "http://a", "b": "http://b"}, complete=True)
    await until(lambda: len(cluster.timeouts) == 2)
    registry.listing = Listing({"a": "http://a"}, complete=True)
    await until(lambda: ingress._llm.replicas.names == ["a"])
    assert (await ingress._llm.clear(ALL_NAMESPACES)).namespaces == 1
    await ingress._end()


@pytest.mark.parametrize("options", [{"shared_cache": True}, {"disk_cache": True, "disk_cache_read_only": True}, {}])
def test_tenants_find_what_was_stored_for_them_before_a_restart(options: dict[str, bool], tmp_path: Path) -> None:
    """Their namespaces had other names after each start: nothing was found, nor cleared any more."""
    llm: Any = {
        name: str(tmp_path) if value and name != "disk_cache_read_only" else value for name, value in options.items()
    }
    expected = namespaces_secret({**llm, "disk_cache_read_only": False})  # another process has written there
    application = build(ApplicationOptions.of({"port": 8000, **llm}))
    deployment = application._bound_deployment
    assert deployment.func_or_class.__name__ == ListeningIngress.__name__
    assert deployment.init_args[-1] == expected
