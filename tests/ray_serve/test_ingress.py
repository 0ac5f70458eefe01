"""The public server under Ray Serve, without Ray: what it is told, and when Serve is to replace it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support.pretended_replicas import GREEDY, Body, Cluster, line, llm_of

from radixkv.prompts import Prompt
from radixkv.ray.application import build
from radixkv.ray.ingress import ListeningIngress, _IngressDeployment
from radixkv.ray.options import ApplicationOptions
from radixkv.server.run import namespaces_secret


def test_serve_replaces_an_ingress_that_was_drained_when_it_has_answered_everything() -> None:
    """It was healthy to Serve, and refused all requests until somebody restarted it."""

    async def main() -> None:
        cluster, end = Cluster(), asyncio.Event()

        async def generate(request: httpx.Request) -> httpx.Response:
            async def body() -> Any:
                yield line(1)
                await end.wait()
                yield line(1, "length")

            return httpx.Response(200, stream=Body(body))

        cluster.answers["/generate"] = generate
        replicas = await cluster.up("a")
        ingress = _IngressDeployment.__new__(_IngressDeployment)
        ingress._tasks, ingress._llm = [], llm_of(replicas)
        ingress._membership = SimpleNamespace(is_outdated=False)
        (stream,) = await ingress._llm.submit([Prompt([1])], GREEDY)
        ingress._llm.start_draining()
        await ingress.check_health()
        end.set()
        assert [delta async for delta in stream][-1].finished
        with pytest.raises(RuntimeError, match="drained"):
            await ingress.check_health()
        await replicas.close()

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
