"""How commands end."""

from __future__ import annotations

import typer


def exit_unless(succeeded: bool) -> None:
    """End a command that has failed, as its report says, with exit code 1."""
    if not succeeded:
        raise typer.Exit(1)
