"""A `radixkv serve` process to measure."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def server_process(*arguments: str) -> Iterator[tuple[str, int]]:
    """Start a server on a free port; yields its address and its process id.

    Args:
        arguments: of `radixkv serve`.

    Raises:
        ValueError: it did not start.
    """
    command = [sys.executable, "-m", "radixkv", "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("Serving "):
                raise ValueError(f"`{' '.join(command)}` did not start; run it to see why")
            yield line.split()[-1], process.pid
        finally:
            process.terminate()
