"""Processes of a cluster to measure: replicas, which can be killed and started anew, and an ingress over them."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


class BenchProcess:
    """A `radixkv` process that says "Serving ... at ADDRESS" when it is up.

    Args:
        arguments: of `radixkv`.
        secret: of the replicas.
    """

    def __init__(self, arguments: Sequence[str], secret: str) -> None:
        self._arguments = list(arguments)
        self._environment = {**os.environ, "RADIXKV_REPLICA_SECRET": secret}
        self._process: subprocess.Popen[str] | None = None
        self.address = ""

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, and do not wait."""
        command = [sys.executable, "-m", "radixkv", *self._arguments]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=self._environment
        )

    def wait_until_up(self) -> None:
        """Returns when it serves.

        Raises:
            ValueError: it did not start.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("Serving "):
            raise ValueError(f"`radixkv {' '.join(self._arguments)}` did not start; run it to see why")
        self.address = line.split()[-1]

    def kill(self) -> None:
        """As by ``kill -9``."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()


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
    secret, named = secrets.token_urlsafe(24), [] if model is None else [model]
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
