"""A process that answers lines with lines of JSON: an engine in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

# Read of what it wrote to standard error.
_MAX_ERROR_BYTES = 4096


class LineProcess:
    """A process that is started at once; `reply` reads its first line.

    Args:
        name: of what runs in it.
        command: to run.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self._name = name
        # A file, which it can fill however much it writes there.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed by `close`
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def ask(self, line: str) -> Any:
        """Send it a line, and return its reply.

        Raises:
            ChildProcessError: it has ended.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and `reply` says how
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        return self.reply()

    def reply(self) -> Any:
        """The next line that it prints, decoded.

        Raises:
            ChildProcessError: it has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildProcessError(
                f"{self._name}: its process ended with status {self._process.wait()}; its last line was: {self._last_error()}"
            )
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def _last_error(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _MAX_ERROR_BYTES))
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
