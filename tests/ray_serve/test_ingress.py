"""The public server under Ray Serve, without Ray: what it is told, and when Serve is to replace it."""

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
from radixkv.config import ModelConfig
from radixkv.prompts import Prompt
from radixkv.ray import ingress as ray_ingress
from radixkv.ray.application import build
from radixkv.ray.ingress import ListeningIngress, _IngressDeployment
from radixkv.ray.options import ApplicationOptions
from radixkv.ray.registry import Listing
from radixkv.server.config import ServerConfig
from radixkv.server.keys import hash_of
from radixkv.server.run import namespaces_secret


def test_serve_replaces_an_ingress_that_was_drained_when_it_has_answered_everything() -> None:
    """It was healthy to Serve, and refused all requests until somebody restarted it."""

    async def main() -> None:
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

    asyncio.run(main())


def test_keys_that_change_while_an_ingress_waits_for_its_first_replica_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They were read at the next change, since the file was first looked at when a replica was up."""
    keys, cluster = tmp_path / "keys.toml", Cluster()
    keys.write_text(f'[keys.ann]\nsha256 = "{hash_of("a")}"\n')

    async def change(request: httpx.Request) -> httpx.Response:  # asked before it is up
        if "robert" not in keys.read_text():
            keys.write_text(f'[keys.robert]\nsha256 = "{hash_of("b")}"\n')
        return httpx.Response(200)

    async def secret(registry: Any) -> str:
        return SECRET

    async def listing(call: Any) -> Listing:
        return Listing({"a": "http://a"}, complete=True)

    cluster.answers["/tenants"] = change
    monkeypatch.setattr(ray_ingress, "forgo_torch", lambda: None)
    monkeypatch.setattr(ray_ingress, "shared_secret", secret)
    monkeypatch.setattr(ray_ingress, "answer_of", listing)
    monkeypatch.setattr(ray_ingress, "_SECONDS_BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr(radixkv.cluster, "ReplicaSet", lambda secret: cluster.replicas())
    monkeypatch.setattr(
        cluster_ingress, "create_ingress", lambda _, replicas, **__: SimpleNamespace(llm=llm_of(replicas))
    )

    async def main() -> None:
        registry: Any = SimpleNamespace(listing=SimpleNamespace(remote=lambda: None))
        ingress = _IngressDeployment.__new__(_IngressDeployment)
        await ingress.__init__(registry, registry, ServerConfig(keys_file=keys), ModelConfig(), None)  # type: ignore[misc]
        await until(lambda: "keys read from" in caplog.text)
        assert ingress._tenants.by_api_key("b")
        await ingress._end()

    with caplog.at_level(logging.INFO, "radixkv"):
        asyncio.run(main())


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
