"""The server's process: its socket, its signals and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import uvicorn
import uvloop

from radixkv.async_llm import AsyncLLM
from radixkv.server.app import create_app
from radixkv.server.metrics import ServerMetrics
from radixkv.server.service import Service, max_characters
from radixkv.server.tenants import Tenants
from radixkv.server.token_text import TokenTexts

_log = logging.getLogger(__name__)

# After the last request is answered, for slow readers to take the answer.
_SECONDS_TO_READ = 5


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How to serve; see `radixkv serve --help`."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    served_model_name: str | None = None
    max_queue: int = 256
    max_body_bytes: int = 8 << 20
    grace_seconds: float = 30.0


def run_server(model: str | None, options: ServeOptions, engine_options: Mapping[str, Any]) -> int:
    """Serve until SIGTERM or SIGINT, then finish what runs; a second signal does not wait for that.

    Returns:
        The exit status: 0 after a signal, 1 when the engine died.

    Raises:
        OSError: the address cannot be used.
        ValueError, ModelLoadError: an option is not possible, or the model cannot be loaded.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    tenants = Tenants(options.api_keys, options.admin_key)
    # Taken before the model is loaded, so that a wrong address is known at once; nobody can connect before it listens.
    with _bound_socket(options.host, options.port) as listener:
        llm = AsyncLLM(model, max_queue=options.max_queue, **engine_options)
        llm.loaded.require_tokenizer()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(llm, options, tenants, listener))


async def _serve(llm: AsyncLLM, options: ServeOptions, tenants: Tenants, listener: socket.socket) -> int:
    leave, hurry = asyncio.Event(), asyncio.Event()
    service = Service(
        llm=llm,
        model_name=options.served_model_name or llm.loaded.name,
        tenants=tenants,
        metrics=ServerMetrics(llm),
        token_texts=TokenTexts(llm.loaded.tokenizer),
        max_characters=max_characters(llm.loaded),
        started=int(time.time()),
        drain=leave.set,
    )
    config = uvicorn.Config(
        create_app(service, options.max_body_bytes),
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_SECONDS_TO_READ,
    )
    server = _Server(config, f"{service.model_name} at http://{_shown(listener)}")
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, lambda: hurry.set() if leave.is_set() else leave.set())

    serving = asyncio.ensure_future(server.serve([listener]))
    try:
        await _first(serving, leave.wait(), llm.wait_for_death())
        if llm.death is None and not serving.done():
            llm.start_draining()
            _log.info("draining: %d requests are unfinished", llm.num_unfinished)
            await _first(llm.shutdown(options.grace_seconds), hurry.wait(), llm.wait_for_death())
    finally:
        finished = await llm.shutdown()
        server.should_exit = True
        await serving
    if llm.death is not None:
        return 1
    _log.info("stopped; %s", "all requests were answered" if finished else "some requests were given up")
    return 0


async def _first(*works: Any) -> None:
    """Wait until one of them is done, and cancel the others that were begun for it."""
    tasks = [asyncio.ensure_future(work) for work in works]
    begun = [task for task, work in zip(tasks, works, strict=True) if task is not work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in begun:
            task.cancel()


class _Server(uvicorn.Server):
    """Says when it listens, and leaves signals to us: uvicorn would stop listening at the first one."""

    def __init__(self, config: uvicorn.Config, what: str) -> None:
        super().__init__(config)
        self._what = what

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(f"Serving {self._what}", flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bound_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


def _shown(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
