"""Processes of a cluster to measure: replicas, which can be killed and started anew, and an ingress over them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from radixkv.bench.serving.server_process import BenchProcess


@contextmanager
def cluster(
    num_replicas: int, model: str | None, *options: str
) -> Iterator[tuple[dict[str, BenchProcess], BenchProcess]]:
    """Start replicas on Unix sockets, and an ingress on a free port; yields both.

    Args:
        num_replicas: how many.
        model: that all run; None: the default one.
        options: of each replica.

    Raises:
        ValueError: one did not start.
    """
    secret, named = {"RADIXKV_REPLICA_SECRET": secrets.token_urlsafe(24)}, [] if model is None else [model]
    with TemporaryDirectory() as folder, ExitStack() as stack:
        replicas, urls = {}, []
        for name in (f"r{number}" for number in range(num_replicas)):
            path = Path(folder) / f"{name}.sock"
            replicas[name] = BenchProcess(["replica", *named, "--listen", f"unix:{path}", *options], secret)
            stack.callback(replicas[name].kill)
            replicas[name].start()
            urls += ["--replica", f"{name}=unix://{path}"]
        for replica in replicas.values():
            replica.wait_until_up()
        ingress = BenchProcess(["ingress", *named, "--port", "0", *urls], secret)
        stack.callback(ingress.kill)
        ingress.start()
        ingress.wait_until_up()
        yield replicas, ingress
