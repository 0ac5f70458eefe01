"""`radixkv serve --replicas`: the application on a local Ray of its own, or in an existing cluster, until a signal comes."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

from radixkv.cache.counted import counted
from radixkv.extras import needing_extra
from radixkv.ray.memory import available_memory, check_memory, replica_memory
from radixkv.ray.options import ApplicationOptions, PlacementConfig, cpus_per_replica
from radixkv.server.reload import ReloadSignal
from radixkv.server.run import start_logging
from radixkv.server.transport.listener import tcp_listener

if TYPE_CHECKING:
    from ray.serve import Application

_log = logging.getLogger(__name__)

_APPLICATION = "radixkv"
_OBJECT_STORE_BYTES = 100 << 20  # of Ray's objects, of which there are hardly any
_LOOPBACK = "127.0.0.1"
# For Ray's processes, the registry and the ingress: measured 0.9 GiB without the ingress.
_BESIDE_BYTES = 1536 << 20
_SECONDS_BETWEEN_LOOKS = 0.5
# Ray gives its processes 30 seconds to start, which a loaded machine may not keep.
_ATTEMPTS_TO_START = 3


def serve_replicas(options: ApplicationOptions) -> int:
    """Serve until SIGTERM or SIGINT, then finish what runs; a second signal ends it at once.

    Returns:
        The exit status, 0.

    Raises:
        OSError: the address cannot be used.
        ConnectionError: there is no Ray at ``ray_address``.
        MissingPackageError: Ray is not installed.
        MemoryError: the replicas would not fit into this machine.
        ValueError: it has too few GPUs; the application could not be started, and the message has Ray Serve's reason; or
            there is one of its name in the cluster.
    """
    start_logging()
    if options.placement.ray_address is None:
        options = _for_this_machine(options)
        _set_environment(os.environ)
    # Imported only here: they import Ray, which takes seconds and reads the environment.
    with needing_extra("ray"):
        from ray import serve

        from radixkv.ray.application import build

    server = options.server
    with ReloadSignal(), _ray(options.placement):  # SIGHUP does nothing: the ingress sees changes of its file of keys
        before = serve.status()
        if _APPLICATION in before.applications:
            raise ValueError(
                f"ray_address: expected a cluster without an application {_APPLICATION!r}, and one is there; "
                "end it first, or deploy a second one under another name by `serve run`"
            )
        application = build(options)
        serve.start(proxy_location="Disabled")
        joined = options.placement.ray_address is not None
        with _deployed(application, stop_serve=joined and not (before.proxies or before.applications)):
            scheme = "http" if server.ssl_certfile is None else "https"
            url = f"{scheme}://{server.host}:{server.port}"
            print(f"Serving {counted(options.placement.min_replicas, 'replica')} at {url}", flush=True)
            _wait_for_signal()
            _log.info("draining")
    _log.info("stopped")
    return 0


@contextmanager
def _deployed(application: Application, *, stop_serve: bool) -> Iterator[None]:
    """The application runs, and ends with the block; one that does not come up is taken away again.

    Args:
        application: what `build` made.
        stop_serve: end Serve with it, if nothing else runs there by then.

    Raises:
        ValueError: it could not be started; the message has Ray Serve's reason.
    """
    from ray import serve

    try:
        try:
            serve.run(application, name=_APPLICATION, route_prefix=None)
        except RuntimeError as error:
            raise ValueError(f"the application could not be started: {error}") from error
        yield
    except BaseException:
        try:
            _delete(stop_serve=stop_serve)
        except Exception:  # must not hide the first error
            _log.exception("the application could not be deleted")
        raise
    _delete(stop_serve=stop_serve)


def _delete(*, stop_serve: bool) -> None:
    from ray import serve

    serve.delete(_APPLICATION, _blocking=False)  # blocking, it would wait a minute at most
    while _APPLICATION in serve.status().applications:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    if stop_serve and not serve.status().applications:
        serve.shutdown()  # otherwise the next application in the cluster would get no proxies


def _for_this_machine(options: ApplicationOptions) -> ApplicationOptions:
    """The options with values for what is left open, for a local Ray.

    Raises:
        OSError: the address cannot be used.
        MemoryError: the replicas would not fit.
    """
    placement, server = options.placement, options.server
    memory = replica_memory(server.model, options.llm, on_gpu=placement.num_gpus > 0)
    check_memory(placement.most_replicas, memory, available_memory(), _BESIDE_BYTES)
    with tcp_listener(server.host, server.port):  # refused before anything is started
        pass
    llm = options.llm
    if llm.get("share_weights") is None:
        llm = {**llm, "share_weights": placement.most_replicas > 1}
    return replace(
        options,
        llm=llm,
        replica_host=_LOOPBACK,
        placement=placement.model_copy(update={"num_cpus": cpus_per_replica(placement)}),
    )


def _set_environment(environment: MutableMapping[str, str]) -> None:
    """What a local Ray reads when it is imported and started.

    It sends no statistics. It takes orders only from those who have a token, because it listens on all of the machine's
    addresses. Its workers are servers, and so run at the normal priority, unless the user says otherwise: Ray's own default
    is a niceness of 15.
    """
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    environment["RAY_AUTH_MODE"] = "token"
    environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    environment.setdefault("RAY_worker_niceness", "0")


@contextmanager
def _ray(placement: PlacementConfig) -> Iterator[None]:
    """A connection to a cluster, or a local one that ends with it.

    Raises:
        ConnectionError: there is no such cluster, or a local one does not start.
        ValueError: this machine has too few GPUs. A cluster may get more.
    """
    import ray

    if placement.ray_address is not None:
        ray.init(placement.ray_address, log_to_driver=False)
    else:
        _start_ray(placement)
    try:
        if placement.ray_address is None:
            _check_gpus(placement, ray.cluster_resources().get("GPU", 0))
        yield
    finally:
        ray.shutdown()


def _start_ray(placement: PlacementConfig) -> None:
    """Start a local Ray.

    Raises:
        ConnectionError: it does not start.
    """
    import ray

    cores = (placement.num_cpus or 1) * placement.most_replicas + placement.ingresses
    for attempt in range(1, _ATTEMPTS_TO_START + 1):
        try:
            ray.init(
                "local",  # otherwise it would look for a Ray that runs on this machine
                num_cpus=ceil(cores),  # Ray only counts cores that it has promised, which may be more than there are
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                _node_ip_address=_LOOPBACK,
            )
            return
        except Exception as error:
            if type(error) is not Exception:  # Ray has no error class for processes that are late
                raise
            ray.shutdown()
            if attempt == _ATTEMPTS_TO_START:
                raise ConnectionError(f"a local Ray did not start in {attempt} attempts: {error}") from error
            _log.warning("a local Ray did not start (%s): trying again", error)


def _check_gpus(placement: PlacementConfig, available: float) -> None:
    """Refuse to start what would make Ray wait for more GPUs.

    Raises:
        ValueError: the replicas to begin with need more GPUs than there are.
    """
    needed = placement.num_gpus * placement.min_replicas
    if needed > available:
        raise ValueError(
            f"num_gpus: {placement.min_replicas} replicas with {placement.num_gpus:g} each need {needed:g}, and Ray finds "
            f"{available:g} on this machine"
        )


def _wait_for_signal() -> None:
    """Wait for SIGTERM or SIGINT; the next one has its default effect."""
    signalled = threading.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        signal.signal(number, lambda *_: signalled.set())
    signalled.wait()
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
