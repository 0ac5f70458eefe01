"""Reads snapshots from files and servers."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import Any

from radixkv.observe.inspect.replica_snapshots import read_snapshots
from radixkv.observe.inspect.snapshot import CacheSnapshot

_TIMEOUT_SECONDS = 30.0


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: the key is only for the server that was named."""

    def redirect_request(self, *_: Any) -> None:
        return None


def read_source(source: str, key: str | None = None) -> dict[str | None, CacheSnapshot]:
    """Read a file or a URL: it has a snapshot of one cache, or one for each of several replicas.

    Args:
        source: the file's name, or the URL.
        key: the admin key, for servers that require one.

    Returns:
        The snapshots by the replica's name; that of a single engine under None.

    Raises:
        OSError: the file or the server cannot be read.
        ValueError: the content is neither.
    """
    if source.startswith(("http://", "https://")):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            request = urllib.request.Request(source, headers=headers)
        except ValueError as error:
            raise ValueError(f"source: expected a file or a URL, got {source!r} ({error})") from error
        try:
            with urllib.request.build_opener(_NoRedirects).open(request, timeout=_TIMEOUT_SECONDS) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            hint = (
                " (it needs the server's admin key: --admin-key, or RADIXKV_ADMIN_KEY)"
                if error.code == HTTPStatus.UNAUTHORIZED
                else ""
            )
            raise OSError(f"{source}: {error}{hint}") from error
        except urllib.error.URLError as error:
            raise OSError(f"{source}: {error.reason}") from error
        except http.client.InvalidURL as error:
            raise ValueError(f"source: expected a file or a URL, got {source!r} ({error})") from error
        except http.client.HTTPException as error:
            raise OSError(f"{source}: no HTTP: {type(error).__name__}: {error}") from error
    else:
        text = Path(source).read_bytes()
    try:
        return read_snapshots(text)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
