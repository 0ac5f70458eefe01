"""Files of figures that are rewritten again and again, by programs that may be killed at any moment."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace a file's content, all or nothing: a process that is killed must not leave half a file.

    A link keeps leading to its file, and a device or a pipe is written to.
    """
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    path = path.resolve()
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)
