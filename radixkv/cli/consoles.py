"""Where the commands that measure something print what they found."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rich.console import Console


class _UnreadConsole(Console):
    """If standard output is no longer read, prints nothing, and does not end the program."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def console_for(*files: Path | None) -> Console:
    """A console for what is also written to files; if any is given, these are written even if the reader of a pipe leaves.

    It reads no markup: the names, paths and messages that a report quotes may have brackets in them.
    """
    kind = Console if all(file is None for file in files) else _UnreadConsole
    return kind(markup=False, emoji=False)
