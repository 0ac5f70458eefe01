"""An engine under Ray Serve: it listens on a socket of its own, registers it, and deregisters before it ends.

Serve starts it, asks for its health and ends it. Requests and tokens go over the socket: an object of Ray's for each token
would cost a millisecond.
"""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial
from typing import TYPE_CHECKING

import ray
import ray.util
import uvicorn
from ray import serve
from ray.serve.handle import DeploymentHandle

from radixkv.llm_options import LLMOptions
from radixkv.model.onednn_cache import limit_primitive_cache
from radixkv.ray.calls import UNREACHABLE, answer_of, repeat, shared_secret
from radixkv.ray.memory import available_memory, check_memory, replica_memory
from radixkv.ray.registry import RENEWAL_SECONDS
from radixkv.ray.scaling import POOL_USAGE, REQUESTS
from radixkv.server.config import ServerConfig
from radixkv.server.transport.listener import address_of, tcp_listener

if TYPE_CHECKING:
    from radixkv.async_llm import AsyncLLM

_log = logging.getLogger(__name__)

# When the whole application ends, the registry is gone already, and no call ever reaches it.
_SECONDS_TO_LEAVE = 1.0


class EngineDeployment:
    """One replica.

    Args:
        registry: the handle of the `Registry`.
        server: the server's options, of which some are the replicas'.
        options: as `LLM` takes them.
        host: the address to listen on; None: this machine's.

    Raises:
        MemoryError: it would not fit into this machine.
        ValueError, ModelLoadError: an option is impossible, or the model cannot be loaded.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, registry: DeploymentHandle, server: ServerConfig, options: LLMOptions, host: str | None
    ) -> None:
        memory = replica_memory(server.model, options, on_gpu=bool(ray.get_gpu_ids()))
        check_memory(1, memory, available_memory())
        limit_primitive_cache(os.environ)
        # Only here: they import torch, without which the process that describes the application does.
        from radixkv.async_llm import AsyncLLM
        from radixkv.cluster import replica_app
        from radixkv.llm import LLM
        from radixkv.server.pauses import avoid_pauses
        from radixkv.server.watchdog import watch_engine

        llm = LLM(server.model, **options)
        avoid_pauses(llm.engine.grammars)
        self._llm: AsyncLLM = AsyncLLM(llm, max_queue=server.max_queue)
        self._registry = registry
        self._name = serve.get_replica_context().replica_tag
        self._grace_seconds = server.grace_seconds
        self._listening = tcp_listener(host or ray.util.get_node_ip_address(), 0)
        listener = self._listening.__enter__()
        secret = await shared_secret(registry)
        config = uvicorn.Config(
            replica_app(self._llm, secret),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,  # an ingress reads events for as long as it is there
        )
        self._server = uvicorn.Server(config)
        self._serving = asyncio.ensure_future(self._server.serve([listener]))
        renew = partial(self._registry.renew.remote, self._name, address_of(listener, encrypted=False), secret)
        self._renewing = asyncio.ensure_future(
            repeat("telling the registry of this replica", lambda: answer_of(renew()), RENEWAL_SECONDS)
        )
        self._watching = asyncio.ensure_future(watch_engine(self._llm, server.step_timeout))

    async def check_health(self) -> None:
        """Called by Serve, which starts another replica instead when it fails.

        Raises:
            EngineDeadError: the engine has died, or its step takes too long.
            RuntimeError: no ingress can reach it, or would learn of it.
        """
        if self._llm.death is not None:
            raise self._llm.death
        if self._serving.done() or self._renewing.done():
            raise RuntimeError("the replica's server, or its renewal in the registry, has stopped")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve, for `LoadPolicy`."""
        stats = self._llm.stats
        return {REQUESTS: self._llm.num_unfinished, POOL_USAGE: stats.num_blocks_in_use / stats.num_blocks}

    async def __del__(self) -> None:
        """Called by Serve before it ends the process: ingresses move what runs here, or let it finish if this is the last."""
        self._llm.start_draining()
        await self._llm.shutdown(self._grace_seconds)
        self._renewing.cancel()
        self._watching.cancel()
        self._server.should_exit = True
        await asyncio.gather(self._leave(), self._serving)

    async def _leave(self) -> None:
        try:
            await answer_of(self._registry.leave.remote(self._name), _SECONDS_TO_LEAVE)
        except UNREACHABLE as error:
            _log.info("the registry was not notified that this replica ends: %r", error)
