"""A client of one replica, and the secret that replicas and ingresses share."""

from __future__ import annotations

import ssl
from functools import cache
from urllib.parse import urlsplit

import httpx

from radixkv.cluster.transport import ReplicaTransport

_SECONDS_TO_CONNECT = 5.0


def check_secret(secret: str) -> None:
    """Refuse a secret that is easily guessed.

    Raises:
        ValueError: it is.
    """
    if len(secret) < 16 or not secret.isascii():
        raise ValueError("secret: expected at least 16 ASCII characters")


def connect(url: str) -> httpx.AsyncClient:
    """A client of a replica.

    Args:
        url: ``http://host:port``, ``https://host:port`` or ``unix:///path``.

    Raises:
        ValueError: it is none of these.
    """
    parts = urlsplit(url)
    if parts.scheme == "unix" and parts.path and not parts.netloc:
        transport, base_url = ReplicaTransport(parts.path), "http://replica"
    elif parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/"):
        secure = parts.scheme == "https"
        # Reading the certificates takes the event loop tens of milliseconds, and without TLS they are not needed.
        tls = _tls() if secure else None
        transport, base_url = ReplicaTransport((parts.hostname, parts.port or (443 if secure else 80)), tls), url
    else:
        raise ValueError(f"url: expected http://host:port or unix:///path, got {url!r}")
    timeout = httpx.Timeout(None, connect=_SECONDS_TO_CONNECT)
    return httpx.AsyncClient(transport=transport, base_url=base_url, timeout=timeout)


@cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()
