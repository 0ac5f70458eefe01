"""Text files that users write."""

from __future__ import annotations

from pathlib import Path


def read_utf8(path: Path, argument: str | None = None) -> str:
    """A file's text.

    Args:
        path: of the file.
        argument: the one that named the file, for the error; None: the path says enough.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        if argument is None:
            raise
        raise OSError(f"{argument}: cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        where = f"{path}: expected UTF-8" if argument is None else f"{argument}: expected UTF-8 in {path}"
        raise ValueError(f"{where}: {error}") from None
