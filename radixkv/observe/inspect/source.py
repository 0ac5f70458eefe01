"""Reads snapshots from files and servers."""

from __future__ import annotations

import urllib.request
from pathlib import Path

from radixkv.observe.inspect.snapshot import CacheSnapshot

_TIMEOUT_SECONDS = 30.0


def read_snapshot(source: str, key: str | None = None) -> CacheSnapshot:
    """Read a snapshot from a file or a URL.

    Args:
        key: the admin key, for servers that require one.

    Raises:
        OSError: the file or the server cannot be read.
        ValueError: the content is no snapshot.
    """
    if source.startswith(("http://", "https://")):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(source, headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
            return CacheSnapshot.from_json(response.read())
    return CacheSnapshot.from_json(Path(source).read_bytes())
