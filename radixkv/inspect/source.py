"""Where snapshots come from: files and servers."""

from __future__ import annotations

import urllib.request
from pathlib import Path

from radixkv.inspect.snapshot import CacheSnapshot

_TIMEOUT = 30.0


def read_snapshot(source: str) -> CacheSnapshot:
    """Read a snapshot from a file or a URL.

    Raises:
        OSError: the file or the server cannot be read.
        ValueError: what is there is no snapshot.
    """
    if source.startswith(("http://", "https://")):
        with urllib.request.urlopen(source, timeout=_TIMEOUT) as answer:
            return CacheSnapshot.from_json(answer.read())
    return CacheSnapshot.from_json(Path(source).read_bytes())
