"""A real Valkey or Redis server of the system's package, with an empty memory, on a Unix socket."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

EXECUTABLE = shutil.which("valkey-server") or shutil.which("redis-server")


class KeyValueServer:
    """Starts it, and waits until it answers.

    Attributes:
        url: to connect to.
    """

    def __init__(self) -> None:
        # A path of a socket may have 107 letters.
        self._folder = tempfile.TemporaryDirectory(prefix="radixkv")
        self._socket = Path(self._folder.name) / "socket"
        self.url = f"unix://{self._socket}"
        self.start()

    def start(self) -> None:
        assert EXECUTABLE is not None
        options = ["--port", "0", "--unixsocket", self._socket, "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen([EXECUTABLE, *options], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "eady to accept connections" in line:
                return
        raise AssertionError(f"{EXECUTABLE} ended with status {self._process.wait()}")

    def pause(self) -> None:
        """It hangs: it takes connections, and answers nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._socket.unlink(missing_ok=True)
