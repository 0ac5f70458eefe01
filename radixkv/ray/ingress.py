"""The public server under Ray Serve: it finds the replicas by the registry, and keeps nothing that matters.

`ListeningIngress` listens on the public port itself; `ProxiedIngress` gets requests from Serve's proxy, which costs a
millisecond for each event of a stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import uvicorn
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from radixkv.config import ModelConfig
from radixkv.model.without_torch import forgo_torch
from radixkv.ray.calls import answer_of, repeat, shared_secret
from radixkv.ray.registry import RENEWAL_SECONDS
from radixkv.server.config import ServerConfig

_SECONDS_BETWEEN_LOOKS = 5.0  # at the file of keys


class _IngressDeployment:
    """What both kinds share.

    Args:
        registry: the handle of the `Registry`.
        engines: the handle of the `EngineDeployment`, which Serve starts because it is an argument.
        server: the server's options.
        model: options of which some say how answers are read.
        namespaces: the secret of the tenants' namespaces; None: one that all ingresses have until the application ends.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        registry: DeploymentHandle,
        engines: DeploymentHandle,
        server: ServerConfig,
        model: ModelConfig,
        namespaces: bytes | None,
    ) -> None:
        forgo_torch()  # this process is an ingress and nothing else
        # Imported only here: the process that describes the application needs none of it.
        from radixkv.cluster import ReplicaSet
        from radixkv.cluster.ingress import create_ingress, tenant_names_key
        from radixkv.cluster.membership import Membership
        from radixkv.server.reload import KeysReload
        from radixkv.server.run import make_observers, make_tenants

        secret = await shared_secret(registry)
        # Before it is read for the first time, so that no change is missed while the replicas load their model.
        keys_state = None if server.keys_file is None else _state_of(Path(server.keys_file))
        self._tenants = make_tenants(server, namespaces or tenant_names_key(secret))
        write_log, tracer = make_observers(server)
        replicas = ReplicaSet(secret)
        await replicas.set_tenants(self._tenants.shares)  # there is no replica yet: each gets them before it is up
        self._membership = Membership(replicas, {})

        async def follow() -> None:
            listing = await answer_of(registry.listing.remote())
            self._membership.update(listing.after(self._membership.wanted))

        self._tasks = [asyncio.ensure_future(repeat("asking for replicas", follow, RENEWAL_SECONDS))]
        while not replicas.available:
            await self._membership.next_attempt()
        self._config = server
        self._app = create_ingress(
            server, replicas, model_config=model, tenants=self._tenants, write_log=write_log, tracer=tracer
        )
        self._llm = self._app.llm
        if server.keys_file is not None:
            reload = KeysReload(Path(server.keys_file), self._tenants, self._llm.set_tenants)
            self._tasks.append(asyncio.ensure_future(_at_changes(Path(server.keys_file), keys_state, reload)))
        self._begin_serving()

    def _begin_serving(self) -> None:
        """Take requests, which can be answered from now on, if Serve does not pass them on."""

    async def check_health(self) -> None:
        """Called by Serve, which replaces this ingress when it fails: a new one does not hold on to earlier replicas.

        Raises:
            RuntimeError: the replicas run something else than when it began; it no longer follows the registry or the file of
                keys; or it was drained, and has answered everything.
        """
        if any(task.done() for task in self._tasks):
            raise RuntimeError("the ingress no longer follows the registry, or the file of keys")
        if self._membership.is_outdated:
            raise RuntimeError("the replicas run something else now than when this ingress began")
        if self._llm.is_drained:
            raise RuntimeError("the ingress was drained, and has answered everything")

    async def _end(self) -> None:
        await self._llm.shutdown()
        for task in self._tasks:
            task.cancel()
        await self._membership.close()
        await self._llm.replicas.close()


class ListeningIngress(_IngressDeployment):
    """It listens on host and port of the server's options; several may listen on the same port of a machine."""

    def _begin_serving(self) -> None:
        from radixkv.server.run import SECONDS_TO_READ, uvicorn_config
        from radixkv.server.transport.handover import Handover
        from radixkv.server.transport.listener import listener_for

        self._listening = ExitStack()
        self._listener = self._listening.enter_context(listener_for(self._config, self._tenants, shared=True))
        self._handover = Handover(self._app)
        self._server = uvicorn.Server(
            uvicorn_config(self._config, self._handover, self._config.grace_seconds + SECONDS_TO_READ)
        )
        self._serving = asyncio.ensure_future(self._server.serve([self._listener]))

    async def check_health(self) -> None:
        """See `_IngressDeployment`.

        Raises:
            RuntimeError: as there, or it has stopped listening.
        """
        await super().check_health()
        if self._serving.done():
            raise RuntimeError("the server has stopped")

    async def __del__(self) -> None:
        """Called by Serve before it ends the process: leave the port to the successor, and finish what runs."""
        await self._handover.begin(self._server, self._listener)
        self._server.should_exit = True
        await asyncio.wait([self._serving], timeout=self._config.grace_seconds)
        await self._end()
        await self._serving
        self._listening.close()


@serve.ingress()
class ProxiedIngress(_IngressDeployment):
    """Its requests come by Serve's proxy."""

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app

    async def __del__(self) -> None:
        """Called by Serve before it ends the process, when all requests have been answered."""
        await self._end()


async def _at_changes(path: Path, known: tuple[int, int] | None, react: Callable[[], None]) -> None:
    """React whenever a file has changed: a user cannot send a signal to a process under Ray.

    Args:
        known: the state that has been reacted to, see `_state_of`.
    """
    while True:
        state = _state_of(path)
        if state != known:
            known = state
            react()
        await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)


def _state_of(path: Path) -> tuple[int, int] | None:
    """What differs after a change: time and size; None: the file is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
