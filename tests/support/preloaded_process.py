"""Python programs in processes of their own that start with RadixKV imported, which takes longer than most of what they do.

They are forked from one process that has imported it, has no threads, and runs nothing else: signals, exit statuses and
standard streams are those of any process. Where starting is the subject, tests start Python itself.

That one is itself a fork of the tests' process, made before the first test: importing everything again takes ten seconds.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from tempfile import TemporaryFile
from typing import Any, TextIO
from unittest.mock import patch

_PRELOADED = [
    "radixkv.cli.main",
    "radixkv.async_llm",
    "radixkv.cluster.replica_routes",
    "radixkv.cluster.run",
    "radixkv.server.app",
    "radixkv.server.run",
    # What the default model makes transformers import.
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_tokenizers",
]
COMMAND_LINE = "from radixkv.cli.main import main; main()"


def fork_preloaded() -> None:
    """Fork the process from which the others are forked; to be called while this one has neither threads nor open work."""
    forkserver.set_forkserver_preload(_PRELOADED)
    with patch.object(util, "spawnv_passfds", _fork):
        forkserver.ensure_running()


def _fork(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Stands in for a new Python that would run ``arguments[-1]`` and keep these file descriptors."""
    pid = os.fork()
    if pid:
        return pid
    try:
        # As in a new process, and not as pytest wants them. Its files are closed, so that none stays open after it.
        faulthandler.disable()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a script ignore it
        logging.getLogger().handlers.clear()
        warnings.resetwarnings()
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        kept = sorted({0, 1, 2, *descriptors})
        for previous, following in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(previous + 1, following)
        exec(arguments[-1], {"__name__": "__main__"})
    finally:  # nothing may reach the tests' own stack, whose process this is not
        os._exit(0)


class PreloadedProcess:
    """``python -c PROGRAM ARGUMENTS``, with the methods of `subprocess.Popen` that tests need.

    Its environment and folder are this process's at the call; ``stdin``, ``stdout`` and ``stderr`` are file descriptors, and
    without ``stdout`` its standard output is read from ``self.stdout``.
    """

    def __init__(
        self, program: str, *arguments: str, stdin: int = 0, stdout: int | None = None, stderr: int = 2
    ) -> None:
        reader, writer = os.pipe() if stdout is None else (None, stdout)
        streams = (stdin, writer, stderr)
        self._process = _StartedProcess(streams, program, arguments)
        self._process.start()
        self.stdout: TextIO | None = None
        if reader is not None:
            os.close(writer)
            self.stdout = open(reader)  # noqa: SIM115 - open as long as the process is looked at

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("python -c", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def run_preloaded(program: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run` does with ``capture_output``."""
    with TemporaryFile("w+") as given, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        given.write(stdin)
        given.seek(0)
        process = PreloadedProcess(program, *arguments, stdin=given.fileno(), stdout=out.fileno(), stderr=err.fileno())
        status = process.wait(600)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess([program, *arguments], status, out.read(), err.read())


class _StartedProcess(ForkServerProcess):
    """File descriptors can be duplicated for a process only while it is being started, which is when it is pickled."""

    def __init__(self, streams: tuple[int, int, int], program: str, arguments: tuple[str, ...]) -> None:
        super().__init__()
        self._streams = streams
        self._program = program
        self._arguments = arguments
        self._environment = dict(os.environ)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_streams": tuple(map(DupFd, self._streams))}

    def run(self) -> None:
        for number, stream in enumerate(self._streams):
            os.dup2(stream.detach(), number)
        # New ones: what can be done with a stream, such as seeking, is found out when it is opened.
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
        os.environ.clear()
        os.environ.update(self._environment)
        sys.argv = ["-c", *self._arguments]
        exec(compile(self._program, "<string>", "exec"), {"__name__": "__main__"})
