"""Blobs in Valkey or Redis.

Needs redis-py: ``pip install 'radixkv[redis]'``, which also installs hiredis; with it, reading takes half the processor time.
The server decides what to evict: give it ``maxmemory`` and ``maxmemory-policy allkeys-lru``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

from radixkv.tiers.shared_tier import PartlyWrittenError

_NAMES_PER_SCAN = 1000


class RedisBlobs:
    """A store of blobs (`radixkv.tiers.shared_tier.BlobStore`) in one database of a server.

    Args:
        url: such as ``redis://user:password@host:6379/0``, ``rediss://...`` for TLS, or ``unix:///run/valkey.sock``.
        timeout: seconds to wait for a connection, and for each part of an answer.

    Attributes:
        description: of the server, without the password.

    Raises:
        ImportError: redis-py is not installed.
        ValueError: it is not a URL.
    """

    def __init__(self, url: str, *, timeout: float = 1.0) -> None:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        parts = urlsplit(url)
        self.description = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        self._error = redis.RedisError
        # No retries here: `Backoff` tries again later, without blocking.
        self._client = redis.Redis.from_url(
            url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0)
        )

    def count_present(self, names: Sequence[str]) -> int:
        present = self._present(names)
        return next((i for i, found in enumerate(present) if not found), len(present))

    def first_present(self, names: Sequence[str]) -> int | None:
        return next((i for i, found in enumerate(self._present(names)) if found), None)

    def read(self, names: Sequence[str]) -> Sequence[bytes | None]:
        with self._errors():
            blobs: list[bytes | None] = self._client.mget([_key(name) for name in names])  # type: ignore[assignment]
            return blobs

    def write(self, blobs: Mapping[str, bytes]) -> int:
        missing = [name for name, found in zip(blobs, self._present(list(blobs)), strict=True) if not found]
        with self._errors(), self._client.pipeline(transaction=False) as pipeline:
            for name in missing:
                pipeline.set(_key(name), blobs[name])
            answers = pipeline.execute(raise_on_error=False)
        refusals = [answer for answer in answers if isinstance(answer, self._error)]
        if refusals:
            error = refusals[0]
            raise PartlyWrittenError(f"{type(error).__name__}: {error}", len(missing) - len(refusals), len(refusals))
        return len(missing)

    def mark_used(self, names: Sequence[str]) -> None:
        with self._errors():
            self._client.touch(*map(_key, names))  # to the second: they have no order among them

    def delete(self, names: Sequence[str]) -> None:
        with self._errors():
            self._client.unlink(*map(_key, names))

    def clear(self, path: str) -> None:
        with self._errors():
            cursor = 0
            while True:
                cursor, keys = self._client.scan(cursor, match=_key(f"{path}/*"), count=_NAMES_PER_SCAN)
                if keys:
                    self._client.unlink(*keys)
                if not cursor:
                    return

    def close(self) -> None:
        self._client.close()

    def _present(self, names: Sequence[str]) -> list[bool]:
        with self._errors(), self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.exists(_key(name))
            return [bool(found) for found in pipeline.execute()]

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise OSError(f"{type(error).__name__}: {error}") from error


def _key(name: str) -> str:
    return f"radixkv/{name}"
