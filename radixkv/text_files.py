"""Text files that users write."""

from __future__ import annotations

from pathlib import Path


def read_utf8(path: Path, argument: str | None = None) -> str:
    """A file's text.

    Args:
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


def read_hex(path: Path, argument: str, num_bytes: int) -> bytes:
    """The bytes whose hexadecimal digits are all that is in a file, which an argument named.

    Raises:
        OSError: it cannot be read.
        ValueError: something else is in it.
    """
    try:
        text = read_utf8(path, argument)
    except ValueError:
        text = ""  # digits would have been UTF-8
    return parse_hex(f"{argument} {path}", text, num_bytes)


def parse_hex(source: str, text: str, num_bytes: int) -> bytes:
    """As `read_hex`, of a text that comes from elsewhere.

    Args:
        source: what held the text, for the error, which does not show it: it may be most of a key.
        text: may begin and end with white space.

    Raises:
        ValueError: the text is something else.
    """
    try:
        found = bytes.fromhex(text.strip())
    except ValueError:
        found = b""
    if len(found) != num_bytes:
        raise ValueError(
            f"{source}: expected {2 * num_bytes} hexadecimal digits, as `openssl rand -hex {num_bytes}` prints"
        )
    return found
