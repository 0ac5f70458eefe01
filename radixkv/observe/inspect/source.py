"""Reads snapshots from files and servers."""

from __future__ import annotations

import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path

from radixkv.observe.inspect.snapshot import CacheSnapshot

_TIMEOUT_SECONDS = 30.0


def read_snapshot(source: str, key: str | None = None) -> CacheSnapshot:
    """Read a snapshot from a file or a URL.

    Args:
        key: the admin key, for servers that require one.

    Raises:
        OSError: the file or the server cannot be read.
        ValueError: the content is not a snapshot.
    """
    if source.startswith(("http://", "https://")):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(source, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            hint = " (it needs the server's admin key)" if error.code == HTTPStatus.UNAUTHORIZED else ""
            raise OSError(f"{source}: {error}{hint}") from error
        except urllib.error.URLError as error:
            raise OSError(f"{source}: {error.reason}") from error
    else:
        text = Path(source).read_bytes()
    try:
        return CacheSnapshot.from_json(text)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
