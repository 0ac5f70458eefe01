"""The process of one part of a first light: it has a session of its own, and is ended with all that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

from rich.console import Console

_POLL_SECONDS = 2.0
_KEPT_LINES = 200
# How long an aborted process may take to print its stack before it is killed, and how long reading its output may take.
_LAST_WORDS_SECONDS = 2.0
# How long a killed process may take to end.
_KILL_SECONDS = 5.0

# Of every part. None needs a network, and trying to reach one where there is none would take minutes. Output is not buffered,
# so that it is passed on at once, and a part that crashes or is aborted prints its stack.
_ENVIRONMENT = MappingProxyType({"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"})


class PartProcess:
    """A command that has been started, and whose output is printed as it comes.

    Args:
        console: where its output is printed.
        command: the program and its arguments.
        environment: variables in addition to those that it inherits.

    Attributes:
        last_lines: the end of its output, a few hundred lines at most; complete after `read_output`.

    Raises:
        OSError: the program cannot be started.
    """

    def __init__(self, console: Console, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._console = console
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **_ENVIRONMENT, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    def wait(self, seconds_left: Callable[[], float], meanwhile: Callable[[], None]) -> int | None:
        """The exit status; None: its time is over, and it has not ended.

        Args:
            seconds_left: of its time.
            meanwhile: is called every few seconds until it has ended.
        """
        while True:
            try:
                return self._process.wait(timeout=max(0.0, min(_POLL_SECONDS, seconds_left())))
            except subprocess.TimeoutExpired:
                meanwhile()
                if seconds_left() <= 0:
                    return None

    def end(self) -> bool:
        """End it and all that it started; False: a hanging driver holds it, and would hold whatever came next."""
        process = self._process
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WORDS_SECONDS)
            with suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_SECONDS)
        return process.poll() is not None

    def read_output(self) -> None:
        """Read what is left of its output, for a few seconds at most."""
        self._reader.join(timeout=_LAST_WORDS_SECONDS)

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.last_lines.append(line.rstrip())
            self._console.out(line, end="", highlight=False)
