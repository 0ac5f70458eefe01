"""The server's process: its socket, its signals and its end.

Modules that import torch are imported in functions: that takes seconds, and a wrong address should be refused before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from copy import copy
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import uvicorn
import uvloop

from radixkv.config import EngineConfig
from radixkv.extras import needing_extra
from radixkv.llm_options import LLMOptions
from radixkv.model.default_model import DEFAULT_MODEL_NAME
from radixkv.server.access.keys import read_keys_file
from radixkv.server.access.tenants import Tenants
from radixkv.server.config import ServerConfig
from radixkv.server.middleware.request_log import open_access_log
from radixkv.server.reload import KeysReload, ReloadSignal
from radixkv.server.transport.connection import ConnectionLimits, LimitedProtocol
from radixkv.server.transport.listener import address_of, is_private, listen, listener_for, metrics_listener_for
from radixkv.server.transport.open_connections import OpenConnections, possible_connections
from radixkv.server.transport.ports import OnPort, Port
from radixkv.server.transport.tls import TlsConnection, tls_context
from radixkv.tiers.disk.namespace_secret import find_secret

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer
    from starlette.types import ASGIApp

    from radixkv.server.served_model import ServedModel

_log = logging.getLogger(__name__)

# After the last request is finished, for slow readers to read their answers.
SECONDS_TO_READ = 5.0


def run_server(config: ServerConfig, options: LLMOptions) -> int:
    """Serve until SIGTERM or SIGINT, then finish what runs; a second signal aborts it.

    Args:
        options: for the `LLM` that is served.

    Returns:
        The exit status: 0 after a signal, 1 when the engine died.

    Raises:
        OSError: the address or the folder of disk_cache cannot be used.
        ValueError, ModelLoadError: an option is impossible, or the model cannot be loaded.
    """
    start_logging()
    tenants = make_tenants(config, namespaces_secret(options))
    write_log, tracer = make_observers(config)
    # Bound before the model is loaded, so that a wrong address is refused at once; it accepts connections only later.
    with (
        ReloadSignal() as reload_signal,
        listener_for(config, tenants) as listener,
        metrics_listener_for(config, tenants, listener) as metrics_listener,
    ):
        _log.info("loading %s ...", config.model or DEFAULT_MODEL_NAME)
        from radixkv.async_llm import AsyncLLM
        from radixkv.llm import LLM
        from radixkv.server.app import create_app
        from radixkv.server.pauses import avoid_pauses
        from radixkv.server.service import Service
        from radixkv.server.watchdog import watch_engine

        model = LLM(config.model, **options)
        model.get_tokenizer()
        llm = AsyncLLM(
            model,
            max_queue=config.max_queue,
            tenants=tenants.shares,
            max_seqs_per_request=config.max_seqs_per_request or max(1, model.engine.max_num_seqs // 2),
        )

        async def main() -> int:
            drain = asyncio.Event()
            service = Service(llm, config, tenants, drain.set, engine=llm)
            app = create_app(service, write_log=write_log, tracer=tracer)
            reload_signal.set_handler(
                None if config.keys_file is None else KeysReload(Path(config.keys_file), tenants, llm.set_tenants)
            )
            watch = partial(watch_engine, llm, config.step_timeout)
            return await serve(
                llm, config, service.model_name, app, listener, metrics_listener, drain=drain, watch=watch
            )

        avoid_pauses(model.engine.grammars)
        status = run_on_uvloop(main())
    if llm.abandoned:
        leave_at_once(status)
    return status


def run_on_uvloop(main: Coroutine[Any, Any, int]) -> int:
    """Run what serves until it returns an exit status."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def leave_at_once(status: int) -> NoReturn:
    """End the process without waiting for its threads, one of which is stuck."""
    logging.shutdown()
    os._exit(status)


async def serve(
    llm: ServedModel,
    config: ServerConfig,
    name: str,
    app: ASGIApp,
    listener: socket.socket,
    metrics_listener: socket.socket | None = None,
    *,
    drain: asyncio.Event,
    watch: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> int:
    """Serve a model until SIGTERM or SIGINT, or until it dies.

    Args:
        name: of what is served, to be printed.
        listener: bound, and not listening yet.
        metrics_listener: the same for the paths that `transport.ports` names; None: ``listener`` serves these, too.
        drain: starts draining when it is set, as a signal does.
        watch: runs meanwhile.

    Returns:
        The exit status.

    Raises:
        OSError: another process listens there by now.
    """
    encrypted = config.ssl_certfile is not None
    greeting = f"Serving {name} at {address_of(listener, encrypted=encrypted)}"
    servers = _servers(config, app, greeting, listener, metrics_listener)
    watching = None if watch is None else asyncio.ensure_future(watch())
    abort, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: abort.set() if drain.is_set() else drain.set())

    serving: list[asyncio.Future[None]] = []
    try:
        # Not left to the event loop: uvloop does not notice that a socket cannot listen.
        for server, each in servers:
            listen(each, server.config.backlog)
        if metrics_listener is not None:
            _log.info("metrics at %s", address_of(metrics_listener, encrypted=encrypted))
        serving += [asyncio.ensure_future(server.serve([each])) for server, each in servers]
        await _first(serving[0], drain.wait(), llm.wait_for_death())
        if llm.death is None and not serving[0].done():
            llm.start_draining()
            _log.info(
                "draining: unfinished requests: %d; at most %g s for them, or until a second signal (Ctrl-C)",
                llm.num_slots_taken,
                config.grace_seconds,
            )
            await _first(llm.shutdown(config.grace_seconds), abort.wait(), llm.wait_for_death())
    finally:
        finished = await llm.shutdown()
        for server, _ in servers:
            server.should_exit = True
        await asyncio.gather(*serving)
        if watching is not None:
            watching.cancel()
    if llm.death is not None:
        return 1
    _log.info("stopped; %s", "all requests were answered" if finished else "some requests were aborted")
    return 0


def _servers(
    config: ServerConfig, app: ASGIApp, greeting: str, listener: socket.socket, metrics_listener: socket.socket | None
) -> list[tuple[_Server, socket.socket]]:
    """A server for each listener, the first of which prints the greeting; both have one bound of connections."""
    if metrics_listener is None:
        return [(_Server(uvicorn_config(config, app), greeting), listener)]
    api = uvicorn_config(config, OnPort(app, Port.API, private=is_private(listener)))
    metrics = copy(api)
    metrics.app = OnPort(app, Port.METRICS, private=is_private(metrics_listener))
    return [(_Server(api, greeting), listener), (_Server(metrics), metrics_listener)]


def uvicorn_config(config: ServerConfig, app: ASGIApp, seconds_to_end: float = SECONDS_TO_READ) -> uvicorn.Config:
    """How the application is served.

    Args:
        seconds_to_end: for answers that are being sent when the server stops.
    """
    open_connections = OpenConnections(possible_connections())
    limits = ConnectionLimits(config.receive_timeout, config.send_timeout, open_connections)
    context = tls_context(config)
    protocol: Callable[..., asyncio.Protocol] = partial(LimitedProtocol, limits)
    if context is not None:
        protocol = partial(TlsConnection, limits, context)
    return uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], protocol),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=ceil(seconds_to_end),
    )


async def _first(*awaitables: Any) -> None:
    """Wait until one of them is done, and cancel the others unless they were tasks already."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    own = [task for task, awaitable in zip(tasks, awaitables, strict=True) if task is not awaitable]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in own:
            task.cancel()


class _Server(uvicorn.Server):
    """Prints when it listens, and handles no signals: uvicorn would stop listening at the first one.

    Args:
        greeting: what is printed; None: nothing.
    """

    def __init__(self, config: uvicorn.Config, greeting: str | None = None) -> None:
        super().__init__(config)
        self._greeting = greeting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._greeting is not None:
            print(self._greeting, flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def namespaces_secret(options: LLMOptions) -> bytes | None:
    """The secret of the tenants' namespaces, where blocks outlive the process; None: a random one will do.

    Raises:
        OSError, ValueError: see `find_secret`.
    """
    secret_file = options.get("cache_secret_file")
    config = EngineConfig(disk_cache=options.get("disk_cache"), shared_cache=options.get("shared_cache"))
    return find_secret(
        None if secret_file is None else Path(secret_file),
        None if config.disk_cache is None else Path(config.disk_cache),
        config.shared_cache,
        read_only=bool(options.get("disk_cache_read_only")),
    )


def start_logging() -> None:
    """Log to standard error."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # An ingress makes a request to a replica for each that it gets.
    logging.getLogger("httpx").setLevel(logging.WARNING)


def make_tenants(config: ServerConfig, secret: bytes | None) -> Tenants:
    """Who may use the server.

    Args:
        secret: of the names of their namespaces; None: a random one.

    Raises:
        OSError, ValueError: the keys or the certificate cannot be used.
    """
    keys_file = None if config.keys_file is None else Path(config.keys_file)
    keys = None if keys_file is None else read_keys_file(keys_file)
    tenants = Tenants(config.api_keys, config.admin_key, keys, secret=secret, metrics_key=config.metrics_key)
    tls_context(config)  # which would fail only after the model is loaded
    return tenants


def make_observers(config: ServerConfig) -> tuple[Callable[[str], object] | None, Tracer | None]:
    """What writes the access log, and what records spans; None for what was not asked for.

    Raises:
        MissingPackageError: what records spans is not installed.
        OSError, ValueError: they cannot be made.
    """
    write_log = None if config.access_log is None else open_access_log(str(config.access_log))
    if config.otlp_traces_endpoint is None:
        return write_log, None
    with needing_extra("otel", "otlp_traces_endpoint"):
        from radixkv.server.middleware.tracing import otlp_tracer_provider

        provider = otlp_tracer_provider(config.otlp_traces_endpoint)
    return write_log, provider.get_tracer("radixkv")
