"""A process that answers lines with lines of JSON: an engine in an environment of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any


class LineProcess:
    """A process that is started at once; `reply` reads its first line.

    Args:
        name: of what runs in it.
        command: to run.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self._name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, line: str) -> Any:
        """Send it a line, and return its reply.

        Raises:
            RuntimeError: it has ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self.reply()

    def reply(self) -> Any:
        """The next line that it prints, decoded.

        Raises:
            RuntimeError: it has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name}: its process ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
