"""Where commands print."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console


class PlainConsole(Console):
    """Where NO_COLOR is set, writes no escape sequences at all, those that move the cursor included."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, force_terminal=False if os.environ.get("NO_COLOR") else None)


class _UnreadConsole(PlainConsole):
    """If standard output is no longer read, prints nothing, and does not end the program."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard_output()


def console_for(*files: Path | None) -> Console:
    """A console for what is also written to files; if any is given, these are written even if the reader of a pipe leaves.

    It reads no markup: the names, paths and messages that a report quotes may have brackets in them.
    """
    kind = PlainConsole if all(file is None for file in files) else _UnreadConsole
    return kind(markup=False, emoji=False)


def discard_output() -> None:
    """Write what standard output still gets nowhere, because nobody reads it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
