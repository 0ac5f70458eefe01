"""The processes of a cluster: a replica, and an ingress for deployments that start replicas themselves.

Modules that need torch are imported in a function, by replicas only: an ingress computes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from radixkv.cluster.cluster_llm import ClusterLLM
from radixkv.cluster.connection import check_secret
from radixkv.cluster.ingress import create_ingress, tenant_names_key
from radixkv.cluster.membership import Membership, read_replicas
from radixkv.cluster.replica_set import ReplicaSet
from radixkv.config import ModelConfig
from radixkv.llm_options import LLMOptions
from radixkv.model.default_model import DEFAULT_MODEL_NAME
from radixkv.server.config import ServerConfig
from radixkv.server.reload import KeysReload, ReloadSignal
from radixkv.server.run import leave_at_once, make_observers, make_tenants, run_on_uvloop, serve, start_logging
from radixkv.server.transport.listener import listener_for, metrics_listener_for, tcp_listener, unix_listener

_log = logging.getLogger(__name__)


def run_replica(model: str | None, options: LLMOptions, listen: str, secret: str, config: ServerConfig) -> int:
    """Run one engine for ingresses until SIGTERM or SIGINT: it is then drained, so that they move its streams elsewhere.

    Args:
        listen: see `replica_listener`.
        secret: of the replicas.
        config: the server's, of which only the queue, the grace and the time limits apply.

    Returns:
        The exit status: 0 after a signal, 1 when the engine died.

    Raises:
        OSError: the address cannot be used.
        ValueError, ModelLoadError: an option is impossible, or the model cannot be loaded.
    """
    start_logging()
    check_secret(secret)
    with ReloadSignal() as reload_signal, replica_listener(listen) as listener:
        _log.info("loading %s ...", model or DEFAULT_MODEL_NAME)
        from radixkv.async_llm import AsyncLLM
        from radixkv.cluster.replica_routes import replica_app
        from radixkv.llm import LLM
        from radixkv.server.pauses import avoid_pauses
        from radixkv.server.watchdog import watch_engine

        engine = LLM(model, **options)
        llm = AsyncLLM(engine, max_queue=config.max_queue)

        async def main() -> int:
            reload_signal.set_handler(None)
            drain = asyncio.Event()
            name, app = f"a replica of {llm.loaded.name}", replica_app(llm, secret, drain=drain.set)
            watch = partial(watch_engine, llm, config.step_timeout)
            return await serve(llm, config, name, app, listener, drain=drain, watch=watch)

        avoid_pauses(engine.engine.grammars)
        status = run_on_uvloop(main())
    if llm.abandoned:
        leave_at_once(status)
    return status


def run_ingress(
    config: ServerConfig,
    model_config: ModelConfig,
    replicas: Mapping[str, str],
    replicas_file: Path | None,
    secret: str,
) -> int:
    """Serve OpenAI's API over replicas until SIGTERM or SIGINT, then finish what runs.

    Args:
        config: the server's.
        model_config: how answers are read.
        replicas: urls by name.
        replicas_file: more of them (`read_replicas`), read again at SIGHUP: new ones are added, missing ones are removed.
        secret: of the replicas.

    Returns:
        The exit status.

    Raises:
        OSError: the address or a file cannot be used.
        ValueError, ModelLoadError: an option is impossible, replicas differ, or there is no tokenizer.
    """
    start_logging()
    check_secret(secret)
    wanted = replicas if replicas_file is None else {**replicas, **read_replicas(replicas_file)}
    if not wanted:
        raise ValueError("replica: expected at least one NAME=URL, here or in replicas_file")
    tenants = make_tenants(config, tenant_names_key(secret))
    write_log, tracer = make_observers(config)

    async def main(listener: socket.socket, metrics_listener: socket.socket | None) -> int:
        replica_set = ReplicaSet(secret)
        await replica_set.set_tenants(tenants.shares)  # there is no replica yet: it is sent to each before that is up
        membership = Membership(replica_set, wanted)
        try:
            enforcer: ReplicaSet | ClusterLLM = replica_set  # of tenants' shares, which a reload replaces
            reload_keys = None
            if config.keys_file is not None:
                reload_keys = KeysReload(Path(config.keys_file), tenants, lambda shares: enforcer.set_tenants(shares))

            def reload() -> None:
                if reload_keys is not None:
                    reload_keys()
                if replicas_file is not None:
                    membership.reload(replicas, replicas_file)

            reload_signal.set_handler(None if reload_keys is None and replicas_file is None else reload)
            await membership.wait_for_first()

            drain = asyncio.Event()
            ingress = create_ingress(
                config,
                replica_set,
                model_config=model_config,
                tenants=tenants,
                drain=drain.set,
                write_log=write_log,
                tracer=tracer,
            )
            enforcer = ingress.llm  # which enforces them in its queue, too
            name = f"{ingress.service.model_name} by {len(replica_set.wanted)} replicas"
            return await serve(ingress.llm, config, name, ingress, listener, metrics_listener, drain=drain)
        finally:
            reload_signal.set_handler(None)  # nothing would disconnect a replica that joins now
            await membership.close()
            await replica_set.close()

    with (
        ReloadSignal() as reload_signal,
        listener_for(config, tenants) as listener,
        metrics_listener_for(config, tenants, listener) as metrics_listener,
    ):
        return run_on_uvloop(main(listener, metrics_listener))


def replica_listener(listen: str) -> contextlib.AbstractContextManager[socket.socket]:
    """A socket for a replica at ``HOST:PORT``, or ``unix:PATH``.

    Raises:
        OSError: the address cannot be used.
        ValueError: it is malformed.
    """
    if listen.startswith("unix:"):
        return unix_listener(Path("/" + listen[5:].lstrip("/") if listen.startswith("unix:/") else listen[5:]))
    host, colon, port = listen.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 65536):
        raise ValueError(f"listen: expected HOST:PORT or unix:PATH, got {listen!r}")
    return tcp_listener(host.strip("[]"), int(port))
