"""Checks paths: that a command's result can be written, before the command spends minutes on it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import typer


def given_path(given: str) -> Path:
    """The path that an option has.

    Raises:
        typer.BadParameter: it is empty, perhaps from an unset shell variable: it would mean the folder of the process.
    """
    if not given:
        raise typer.BadParameter("expected a path, got ''")
    return Path(given)


def writable(path: Path | None) -> Path | None:
    """Check the file of an option, without touching it.

    Raises:
        typer.BadParameter: it could not be written.
    """
    if path is None:
        return None
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a directory")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"{path.parent} is not a directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path} may not be written")
    return path


def writable_plot(path: Path | None) -> Path | None:
    """The same for a picture that matplotlib draws; the ending of its name is the format.

    Raises:
        typer.BadParameter: it could not be written, or drawn.
    """
    path = writable(path)
    if path is None:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("this needs matplotlib: pip install 'radixkv[bench]'")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    ending = path.suffix.removeprefix(".").lower()
    if ending not in formats:
        raise typer.BadParameter(f"{path} must end in one of {', '.join(sorted(formats))}")
    return path
