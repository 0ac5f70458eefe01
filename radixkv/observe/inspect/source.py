"""Reads snapshots from files and servers."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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
        key: the admin key, for servers that require one.

    Returns:
        The snapshots by the replica's name; that of a single engine under None.

    Raises:
        OSError: the file or the server cannot be read.
        ValueError: the content is neither.
    """
    if not source:
        raise ValueError("source: expected a file or a URL, got ''")
    if not source.startswith(("http://", "https://")):
        return _snapshots(source, Path(source).read_bytes())
    return _snapshots(source, _fetch(source, key), _hint(source))


def _snapshots(source: str, text: bytes, hint: str = "") -> dict[str | None, CacheSnapshot]:
    try:
        return read_snapshots(text)
    except ValueError as error:
        raise ValueError(f"{source}: {error}{hint}") from error


def _fetch(url: str, key: str | None) -> bytes:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=_TIMEOUT_SECONDS) as response:
            text: bytes = response.read()
            return text
    except urllib.error.HTTPError as error:
        hint = _hint(url)
        if error.code == HTTPStatus.UNAUTHORIZED:
            hint = " (it needs the server's admin key: --admin-key, or RADIXKV_ADMIN_KEY)"
        raise OSError(f"{url}: {error}{hint}") from error
    except urllib.error.URLError as error:
        raise OSError(f"{url}: {error.reason}{_hint(url)}") from error
    except (ValueError, http.client.InvalidURL) as error:
        raise ValueError(f"source: expected a file or a URL, got {url!r} ({error})") from error
    except http.client.HTTPException as error:
        raise OSError(f"{url}: the answer is not HTTP: {type(error).__name__}: {error}{_hint(url)}") from error


def _hint(url: str) -> str:
    """Where a server has its snapshot, if a URL does not look like that."""
    parts = urlsplit(url)
    if parts.path.endswith("/snapshot") and parts.port is not None:
        return ""
    return " (radixkv serve has its snapshot at http://HOST:PORT/admin/snapshot, and PORT is 8000 unless it was set)"
