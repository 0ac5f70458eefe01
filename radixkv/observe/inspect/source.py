"""Where snapshots come from: files and servers."""

from __future__ import annotations

import urllib.request
from pathlib import Path

from radixkv.observe.inspect.snapshot import CacheSnapshot

_TIMEOUT = 30.0


def read_snapshot(source: str, key: str | None = None) -> CacheSnapshot:
    """Read a snapshot from a file or a URL.

    Args:
        key: for a server that wants one, its admin key.

    Raises:
        OSError: the file or the server cannot be read.
        ValueError: what is there is no snapshot.
    """
    if source.startswith(("http://", "https://")):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(source, headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            return CacheSnapshot.from_json(answer.read())
    return CacheSnapshot.from_json(Path(source).read_bytes())
