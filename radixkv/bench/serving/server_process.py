"""`radixkv` processes to measure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


class BenchProcess:
    """A `radixkv` process that prints "Serving ... at ADDRESS" when it is up.

    Args:
        arguments: of `radixkv`; an error prints them, so secrets are given by ``environment``.
        environment: variables beside those of this process.
        folder: where it runs, which is where Python looks for `radixkv` first; None: where this process does.
        within: what the command begins with, such as another program that runs `radixkv`.
        log: the file that gets its standard error; None: it is dropped.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        within: Sequence[str] = (),
        log: Path | None = None,
    ) -> None:
        self._arguments = list(arguments)
        self._folder = folder
        self._within = within
        self._log = log or Path(os.devnull)
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[str] | None = None
        self.address = ""

    @property
    def pid(self) -> int:
        """The id of the process."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, and do not wait."""
        command = [*self._within, sys.executable, "-m", "radixkv", *self._arguments]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=self._environment, cwd=self._folder
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

    def terminate(self) -> None:
        """End it as ``kill`` does: it finishes the requests that it has."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()


@contextmanager
def server_process(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    log: Path | None = None,
) -> Iterator[BenchProcess]:
    """Start a server on a free port; yields it when it is up.

    Args:
        arguments: of `radixkv serve`.
        environment: variables beside those of this process.
        folder: where it runs.
        log: the file that gets its standard error; None: it is dropped.

    Raises:
        ValueError: it did not start.
    """
    server = BenchProcess(["serve", "--port", "0", *arguments], environment, folder, log=log)
    try:
        server.start()
        server.wait_until_up()
        yield server
    finally:
        server.terminate()
