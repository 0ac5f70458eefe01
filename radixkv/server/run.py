"""The server's process: its socket, its signals and its end.

What imports torch is imported in functions: it takes seconds, for which a wrong address should not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvicorn
import uvloop

from radixkv.config import LLMOptions
from radixkv.server.config import ServerConfig
from radixkv.server.keys import read_keys_file
from radixkv.server.listener import address_of, is_private, tcp_listener, unix_listener
from radixkv.server.request_log import open_access_log
from radixkv.server.tenants import Tenants
from radixkv.tiers.namespace_secret import find_secret

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from radixkv.async_llm import AsyncLLM

_log = logging.getLogger(__name__)

# After the last request is finished, for slow readers to read their answers.
_SECONDS_TO_READ = 5


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
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    keys_file = None if config.keys_file is None else Path(config.keys_file)
    secret = namespaces_secret(options)
    tenants = Tenants(
        config.api_keys,
        config.admin_key,
        None if keys_file is None else read_keys_file(keys_file),
        secret=secret,
    )
    _check(config)
    write_log = None if config.access_log is None else open_access_log(str(config.access_log))
    tracer = None
    if config.otlp_traces_endpoint is not None:
        from radixkv.server.tracing import otlp_tracer_provider

        tracer = otlp_tracer_provider(config.otlp_traces_endpoint).get_tracer("radixkv")
    # Bound before the model is loaded, so that a wrong address is refused at once; it accepts connections only later.
    with _listener(config) as listener:
        if tenants.open_to_all and not is_private(listener) and not config.allow_unauthenticated:
            raise ValueError(
                f"host: whoever can reach {config.host} could use the server, since there are no API keys; "
                "set api_keys or keys_file, or allow_unauthenticated if that is what you want"
            )
        from radixkv.async_llm import AsyncLLM
        from radixkv.llm import LLM

        model = LLM(config.model, **options)
        model.get_tokenizer()
        llm = AsyncLLM(
            model,
            max_queue=config.max_queue,
            tenants=tenants.shares,
            max_seqs_per_request=config.max_seqs_per_request or max(1, model.engine.max_num_seqs // 2),
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            status = runner.run(_serve(llm, config, tenants, listener, write_log, tracer))
    if llm.abandoned:
        # The usual end of a process would wait for threads, and one is stuck.
        logging.shutdown()
        os._exit(status)
    return status


async def _serve(
    llm: AsyncLLM,
    config: ServerConfig,
    tenants: Tenants,
    listener: socket.socket,
    write_log: Callable[[str], object] | None,
    tracer: Tracer | None,
) -> int:
    from radixkv.server.app import create_app
    from radixkv.server.connection import ConnectionLimits, LimitedProtocol
    from radixkv.server.metrics import ServerMetrics
    from radixkv.server.open_connections import OpenConnections, possible_connections
    from radixkv.server.service import Service, max_characters
    from radixkv.server.time_limits import TimeLimits
    from radixkv.server.token_text import TokenTexts
    from radixkv.server.watchdog import watch_engine

    drain, abort = asyncio.Event(), asyncio.Event()
    model_name, *other_names = config.served_model_name or (llm.loaded.name,)
    service = Service(
        llm=llm,
        model_name=model_name,
        other_names=tuple(other_names),
        tenants=tenants,
        metrics=ServerMetrics(llm),
        token_texts=TokenTexts(llm.loaded.tokenizer),
        max_characters=max_characters(llm.loaded),
        started=int(time.time()),
        drain=drain.set,
        time_limits=TimeLimits(config.queue_timeout, config.first_token_timeout, config.request_timeout),
        step_timeout=config.step_timeout,
        shows_prompts_without_keys=not config.allow_unauthenticated,
    )
    app = create_app(
        service,
        config.max_body_bytes,
        metrics_key=config.metrics_key,
        # Browsers cannot connect to Unix sockets.
        local_only=config.uds is None and not config.allow_unauthenticated,
        cors_origins=config.cors_origins,
        access_log=write_log,
        tracer=tracer,
    )
    open_connections = OpenConnections(possible_connections())
    limits = ConnectionLimits(config.receive_timeout, config.send_timeout, open_connections)
    uvicorn_config = uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], partial(LimitedProtocol, limits)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_SECONDS_TO_READ,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )
    address = address_of(listener, encrypted=config.ssl_certfile is not None)
    server = _Server(uvicorn_config, f"{service.model_name} at {address}")
    watch = asyncio.ensure_future(watch_engine(llm, config.step_timeout))
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, lambda: abort.set() if drain.is_set() else drain.set())

    if config.keys_file is not None:
        loop.add_signal_handler(signal.SIGHUP, _KeysReload(Path(config.keys_file), tenants, llm))

    serving = asyncio.ensure_future(server.serve([listener]))
    try:
        await _first(serving, drain.wait(), llm.wait_for_death())
        if llm.death is None and not serving.done():
            llm.start_draining()
            _log.info("draining: %d requests are unfinished", llm.num_unfinished)
            await _first(llm.shutdown(config.grace_seconds), abort.wait(), llm.wait_for_death())
    finally:
        finished = await llm.shutdown()
        server.should_exit = True
        await serving
        watch.cancel()
    if llm.death is not None:
        return 1
    _log.info("stopped; %s", "all requests were answered" if finished else "some requests were aborted")
    return 0


class _KeysReload:
    """Reads the file of keys anew; a bad file changes nothing and is one error in the log."""

    def __init__(self, path: Path, tenants: Tenants, llm: AsyncLLM) -> None:
        self._path = path
        self._tenants = tenants
        self._llm = llm
        self._pending: asyncio.Future[None] | None = None

    def __call__(self) -> None:
        try:
            keys = read_keys_file(self._path)
            self._tenants.replace_keys(keys)
        except (OSError, ValueError) as error:
            _log.error("keys are kept as they were: %s", error)
            return
        _log.info("%d keys read from %s", len(keys), self._path)
        self._pending = asyncio.ensure_future(self._llm.set_tenants(self._tenants.shares))


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
        name: what is served, and where.
    """

    def __init__(self, config: uvicorn.Config, name: str) -> None:
        super().__init__(config)
        self._name = name

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(f"Serving {self._name}", flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _check(config: ServerConfig) -> None:
    """Refuse options that would fail only after the model is loaded.

    Raises:
        ValueError: a key or a certificate cannot be used.
    """
    key = config.metrics_key
    if key is not None and not (key and key.isascii() and key.isprintable()):
        raise ValueError("metrics_key: expected printable ASCII characters, at least one")
    if config.ssl_certfile is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        except OSError as error:
            message = (
                f"ssl_certfile: {config.ssl_certfile} with ssl_keyfile {config.ssl_keyfile} cannot be used: {error}"
            )
            raise ValueError(message) from error


def namespaces_secret(options: LLMOptions) -> bytes | None:
    """The secret of the tenants' namespaces, where blocks outlive the process; None: a random one will do.

    Raises:
        OSError, ValueError: see `find_secret`.
    """
    secret_file, disk_cache = options.get("cache_secret_file"), options.get("disk_cache")
    return find_secret(
        None if secret_file is None else Path(secret_file),
        None if disk_cache is None else Path(disk_cache),
        options.get("shared_cache"),
        read_only=bool(options.get("disk_cache_read_only")),
    )


def _listener(config: ServerConfig) -> contextlib.AbstractContextManager[socket.socket]:
    return tcp_listener(config.host, config.port) if config.uds is None else unix_listener(Path(config.uds))
