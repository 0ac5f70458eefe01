"""The server's process: its socket, its signals and its end.

What imports torch is imported in functions: it takes seconds, for which a wrong address should not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop

from radixkv.config import LLMOptions
from radixkv.server.config import ServerConfig
from radixkv.server.tenants import Tenants

if TYPE_CHECKING:
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
        OSError: the address cannot be used.
        ValueError, ModelLoadError: an option is impossible, or the model cannot be loaded.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    tenants = Tenants(config.api_keys, config.admin_key)
    # Bound before the model is loaded, so that a wrong address is refused at once; it accepts connections only later.
    with _bound_socket(config.host, config.port) as listener:
        from radixkv.async_llm import AsyncLLM
        from radixkv.llm import LLM

        model = LLM(config.model, **options)
        model.get_tokenizer()
        llm = AsyncLLM(
            model,
            max_queue=config.max_queue,
            max_seqs_per_request=config.max_seqs_per_request or max(1, model.engine.max_num_seqs // 2),
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(llm, config, tenants, listener))


async def _serve(llm: AsyncLLM, config: ServerConfig, tenants: Tenants, listener: socket.socket) -> int:
    from radixkv.server.app import create_app
    from radixkv.server.metrics import ServerMetrics
    from radixkv.server.service import Service, max_characters
    from radixkv.server.token_text import TokenTexts

    drain, abort = asyncio.Event(), asyncio.Event()
    service = Service(
        llm=llm,
        model_name=config.served_model_name or llm.loaded.name,
        tenants=tenants,
        metrics=ServerMetrics(llm),
        token_texts=TokenTexts(llm.loaded.tokenizer),
        max_characters=max_characters(llm.loaded),
        started=int(time.time()),
        drain=drain.set,
    )
    uvicorn_config = uvicorn.Config(
        create_app(service, config.max_body_bytes),
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_SECONDS_TO_READ,
    )
    server = _Server(uvicorn_config, f"{service.model_name} at http://{_address(listener)}")
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, lambda: abort.set() if drain.is_set() else drain.set())

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
    if llm.death is not None:
        return 1
    _log.info("stopped; %s", "all requests were answered" if finished else "some requests were aborted")
    return 0


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


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
