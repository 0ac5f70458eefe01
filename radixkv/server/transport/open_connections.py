"""Bounds what all connections together take: file descriptors, and memory for answers that are not read."""

from __future__ import annotations

import resource
from typing import Protocol

# File descriptors for everything else that the process opens.
_RESERVED_DESCRIPTORS = 256
_MAX_CONNECTIONS = 16_384
_MAX_UNSENT_BYTES = 256 << 20


class Connection(Protocol):
    """A client's connection."""

    def give_up(self) -> None:
        """Close it at once; what is not sent yet is dropped."""


class OpenConnections:
    """Gives up the connections that have waited longest where there are too many, or too much is unread.

    Args:
        max_connections: beyond it, a connection without a complete request is given up.
        max_unsent_bytes: beyond it, a connection that does not read its answer is given up.
    """

    def __init__(self, max_connections: int = _MAX_CONNECTIONS, max_unsent_bytes: int = _MAX_UNSENT_BYTES) -> None:
        self._max_connections = max_connections
        self._max_unsent_bytes = max_unsent_bytes
        self._num_open = 0
        # Given up, and not closed yet: closing takes a turn of the event loop, in which hundreds may be accepted.
        self._leaving: set[Connection] = set()
        # Both with the connection that has waited longest first; `_unread` with the bytes that wait.
        self._idle: dict[Connection, None] = {}
        self._unread: dict[Connection, int] = {}
        self._unsent_bytes = 0

    def opened(self, connection: Connection) -> None:
        """A client has connected."""
        self._num_open += 1
        self._idle[connection] = None
        if self._num_open - len(self._leaving) > self._max_connections:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            self._leaving.add(oldest)
            oldest.give_up()

    def busy(self, connection: Connection) -> None:
        """A request has arrived whole."""
        self._idle.pop(connection, None)

    def idle(self, connection: Connection) -> None:
        """A request was answered."""
        self._idle.pop(connection, None)
        if connection not in self._leaving:
            self._idle[connection] = None

    def unread(self, connection: Connection, num_bytes: int) -> None:
        """This many bytes of an answer wait for the client to read them, and no more are written meanwhile."""
        self._unread[connection] = num_bytes
        self._unsent_bytes += num_bytes
        while self._unsent_bytes > self._max_unsent_bytes:
            slowest = next(iter(self._unread))
            self.read(slowest)
            slowest.give_up()

    def read(self, connection: Connection) -> None:
        """Nearly nothing waits any more."""
        self._unsent_bytes -= self._unread.pop(connection, 0)

    def closed(self, connection: Connection) -> None:
        """A connection has ended, for whatever reason."""
        self._num_open -= 1
        self._leaving.discard(connection)
        self._idle.pop(connection, None)
        self.read(connection)


def possible_connections() -> int:
    """How many connections the system allows, after raising the process's limit of open files as far as it may.

    A process often starts with 1,024, which one client can hold open.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_CONNECTIONS + _RESERVED_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return min(_MAX_CONNECTIONS, max(1, soft - _RESERVED_DESCRIPTORS))
