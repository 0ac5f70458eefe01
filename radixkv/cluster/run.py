"""The processes of a cluster: a replica, and an ingress for deployments that start replicas themselves.

What needs torch is imported by replicas, in a function: an ingress computes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import uvloop
from starlette.types import ASGIApp

from radixkv.cluster.connection import check_secret
from radixkv.cluster.ingress import create_ingress, namespace_secret
from radixkv.cluster.replica_set import MismatchError, ReplicaSet
from radixkv.config import LLMOptions, ModelConfig
from radixkv.server.config import ServerConfig
from radixkv.server.listener import tcp_listener, unix_listener
from radixkv.server.run import (
    KeysReload,
    leave_at_once,
    listener_for,
    make_observers,
    make_tenants,
    metrics_listener_for,
    serve,
    start_logging,
)

_log = logging.getLogger(__name__)

_SECONDS_BETWEEN_ATTEMPTS = 1.0
# Once one replica is up, the others have so long to say what they run before requests are taken.
_SECONDS_FOR_OTHERS = 5.0


def run_replica(model: str | None, options: LLMOptions, listen: str, secret: str, config: ServerConfig) -> int:
    """Run one engine for ingresses until SIGTERM or SIGINT: it is then drained, so that they move its streams elsewhere.

    Args:
        model: as for `LLM`.
        options: likewise.
        listen: ``HOST:PORT``, or ``unix:PATH``.
        secret: of the replicas.
        config: of which the queue, the grace and the time limits count.

    Returns:
        The exit status: 0 after a signal, 1 when the engine died.

    Raises:
        OSError: the address cannot be used.
        ValueError, ModelLoadError: an option is impossible, or the model cannot be loaded.
    """
    start_logging()
    check_secret(secret)
    with bound(listen) as listener:
        from radixkv.async_llm import AsyncLLM
        from radixkv.cluster.replica_routes import replica_app
        from radixkv.llm import LLM
        from radixkv.server.watchdog import watch_engine

        llm = AsyncLLM(LLM(model, **options), max_queue=config.max_queue)

        def make_app(drain: Callable[[], None]) -> tuple[str, ASGIApp]:
            return f"a replica of {llm.loaded.name}", replica_app(llm, secret, drain=drain)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            watch = partial(watch_engine, llm, config.step_timeout)
            status = runner.run(serve(llm, config, listener, make_app, watch=watch))
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
    tenants = make_tenants(config, namespace_secret(secret))
    write_log, tracer = make_observers(config)

    async def main(listener: socket.socket, metrics_listener: socket.socket | None) -> int:
        together = ReplicaSet(secret)
        membership = _Membership(together, wanted)
        await membership.wait_for_first()

        def make_app(drain: Callable[[], None]) -> tuple[str, ASGIApp]:
            return f"{ingress.service.model_name} by {len(wanted)} replicas", ingress

        drain = asyncio.Event()
        ingress = create_ingress(
            config,
            together,
            model_config=model_config,
            tenants=tenants,
            drain=drain.set,
            write_log=write_log,
            tracer=tracer,
        )
        await ingress.llm.set_tenants(tenants.shares)
        reload_keys = None if config.keys_file is None else KeysReload(Path(config.keys_file), tenants, ingress.llm)

        def reload() -> None:
            if reload_keys is not None:
                reload_keys()
            if replicas_file is not None:
                membership.reload(replicas, replicas_file)

        try:
            return await serve(ingress.llm, config, listener, make_app, metrics_listener, drain=drain, reload=reload)
        finally:
            await membership.close()
            await together.close()

    with (
        listener_for(config, tenants) as listener,
        metrics_listener_for(config, tenants) as metrics_listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(main(listener, metrics_listener))


def read_replicas(path: Path) -> dict[str, str]:
    """Names and urls from a file: ``NAME=URL`` a line; what follows a ``#`` is a comment.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is none of these, or a name is there twice.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if text:
            name, url = parse_replica(text, f"{path}: line {number}")
            if name in found:
                raise ValueError(f"{path}: line {number}: {name!r} is there twice")
            found[name] = url
    return found


def parse_replica(text: str, where: str = "replica") -> tuple[str, str]:
    """A name and a url.

    Args:
        text: ``NAME=URL``.
        where: it stands, for the error.

    Raises:
        ValueError: it is something else.
    """
    name, equals, url = text.partition("=")
    if not (name.strip() and equals and url.strip()):
        raise ValueError(f"{where}: expected NAME=URL, got {text!r}")
    return name.strip(), url.strip()


def bound(listen: str) -> contextlib.AbstractContextManager[socket.socket]:
    """A socket for a replica.

    Args:
        listen: ``HOST:PORT``, or ``unix:PATH``.

    Raises:
        OSError: the address cannot be used.
        ValueError: it is none.
    """
    if listen.startswith("unix:"):
        return unix_listener(Path("/" + listen[5:].lstrip("/") if listen.startswith("unix:/") else listen[5:]))
    host, colon, port = listen.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 65536):
        raise ValueError(f"listen: expected HOST:PORT or unix:PATH, got {listen!r}")
    return tcp_listener(host.strip("[]"), int(port))


class _Membership:
    """Keeps a set of replicas as it is wanted: those that do not answer are tried until they do.

    Args:
        replicas: the set.
        wanted: urls by name.
    """

    def __init__(self, replicas: ReplicaSet, wanted: Mapping[str, str]) -> None:
        self._replicas = replicas
        self._wanted = dict(wanted)
        self._changing: dict[str, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._tried: set[str] = set()
        self._refusal: ValueError | None = None
        self._attempted = asyncio.Event()

    async def wait_for_first(self) -> None:
        """Returns when one replica is up, and every other one is up or does not answer yet.

        Raises:
            ValueError: one is of another kind, or a url is impossible.
        """
        self._update(self._wanted)
        while not self._replicas.available:
            await self._next_attempt()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SECONDS_FOR_OTHERS):
                while not self._wanted.keys() <= self._tried:
                    await self._next_attempt()
        if self._refusal is not None:
            raise self._refusal

    async def _next_attempt(self) -> None:
        """Returns when another attempt to join a replica has ended.

        Raises:
            ValueError: one of them was refused.
        """
        self._attempted.clear()
        if self._refusal is None:
            await self._attempted.wait()
        if self._refusal is not None:
            raise self._refusal

    def reload(self, given: Mapping[str, str], path: Path) -> None:
        """Read the file anew; a bad one changes nothing and is one error in the log."""
        try:
            self._update({**given, **read_replicas(path)})
        except (OSError, ValueError) as error:
            _log.error("replicas are kept as they were: %s", error)

    async def close(self) -> None:
        """Try no more."""
        tasks = [*self._changing.values(), *self._leaving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _update(self, wanted: Mapping[str, str]) -> None:
        before, self._wanted = self._wanted, dict(wanted)
        for name in dict.fromkeys([*self._replicas.names, *self._changing, *wanted]):
            is_there = name in self._replicas.names or name in self._changing
            if wanted.get(name) != before.get(name) or not is_there:
                task = asyncio.ensure_future(self._change(name, self._changing.get(name)))
                self._changing[name] = task
                task.add_done_callback(partial(self._changed, name))

    def _changed(self, name: str, task: asyncio.Task[None]) -> None:
        if self._changing.get(name) is task:
            del self._changing[name]

    async def _change(self, name: str, earlier: asyncio.Task[None] | None) -> None:
        """What is there under a name leaves, and what is wanted under it joins."""
        if earlier is not None:
            earlier.cancel()
            await asyncio.gather(earlier, return_exceptions=True)
        leaving = []
        if name in self._replicas.names:
            _log.info("replica %r is removed", name)
            # It goes on if this is cancelled by the next change; its name is free as soon as it has begun.
            task = asyncio.ensure_future(self._replicas.remove(name))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            leaving.append(asyncio.shield(task))
        await asyncio.gather(*leaving, self._join(name))

    async def _join(self, name: str) -> None:
        complaint = ""
        while name in self._wanted:
            try:
                await self._replicas.add(name, self._wanted[name])
                break
            except (ConnectionError, MismatchError) as error:
                self._refusal = error if isinstance(error, MismatchError) else self._refusal
                if str(error) != complaint:
                    complaint = str(error)
                    _log.warning("%s", error)
            except ValueError as error:
                self._refusal = error
                _log.error("%s", error)
                break
            finally:
                self._tried.add(name)
                self._attempted.set()
            await asyncio.sleep(_SECONDS_BETWEEN_ATTEMPTS)
