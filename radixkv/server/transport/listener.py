"""The sockets that the server listens on: of TCP, or at a path."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from radixkv.server.access.tenants import Tenants
    from radixkv.server.config import ServerConfig

# TCP keep-alive of a silent connection: seconds until the first probe, seconds between further ones, and how many unanswered
# probes mean that the other end is gone.
_PROBES = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
_ALL_HOSTS = frozenset({"0.0.0.0", "::"})
# Bytes of a Unix socket's path at most (unix(7)), without the one that ends it.
_MAX_UNIX_PATH = 107


def enable_keepalive(connection: socket.socket) -> None:
    """Have the system probe a TCP connection, and end it when its other end is gone: a reader would wait forever.

    Accepted connections inherit it from the listening socket.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _PROBES:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


@contextmanager
def tcp_listener(host: str, port: int, *, shared: bool = False) -> Iterator[socket.socket]:
    """A socket bound to an address.

    Args:
        host: name or address.
        port: 0: any free one.
        shared: whether other processes of the same user may listen there, too; each connection goes to one of them.

    Raises:
        OSError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            enable_keepalive(listener)
            if shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind((host, port))
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        yield listener


@contextmanager
def unix_listener(path: Path) -> Iterator[socket.socket]:
    """A socket bound to a path, which is removed at the end. Who may connect follows from the process's umask.

    Meanwhile ``PATH.lock`` is locked, because a socket that does not listen yet looks like one that a killed process left.
    The file stays.

    Raises:
        OSError: the path cannot be used, or another process has it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, ExitStack() as held:
        try:
            if len(os.fsencode(path)) > _MAX_UNIX_PATH:
                raise OSError(f"expected at most {_MAX_UNIX_PATH} bytes, got {len(os.fsencode(path))}")
            held.enter_context(_open_locked(Path(f"{path}.lock")))
            if _is_left_over(path):
                path.unlink()
            listener.bind(os.fspath(path))
            own = _identity(path)
        except FileNotFoundError as error:
            raise OSError(f"cannot listen on {path}: there is no folder {path.parent}; make it first") from error
        except OSError as error:
            raise OSError(f"cannot listen on {path}: {error.strerror or error}") from error
        try:
            yield listener
        finally:
            # It may have been removed, and another one may be there.
            with suppress(FileNotFoundError):
                if _identity(path) == own:
                    path.unlink()


@contextmanager
def listener_for(config: ServerConfig, tenants: Tenants, *, shared: bool = False) -> Iterator[socket.socket]:
    """A socket bound to the configured address.

    Args:
        shared: see `tcp_listener`.

    Raises:
        OSError: the address cannot be used.
        ValueError: other machines could reach it without a key.
    """
    by_port = config.uds is None
    own = tcp_listener(config.host, config.port, shared=shared) if by_port else unix_listener(Path(str(config.uds)))
    with own as listener:
        if tenants.open_to_all and not is_private(listener) and not config.allow_unauthenticated:
            raise ValueError(
                f"host: whoever can reach {config.host} could use the server, since there are no API keys; "
                "set api_keys or keys_file, or allow_unauthenticated if that is what you want"
            )
        yield listener


@contextmanager
def metrics_listener_for(
    config: ServerConfig, tenants: Tenants, api_listener: socket.socket
) -> Iterator[socket.socket | None]:
    """A socket bound to the address that is configured for the metrics; None: they have no address of their own.

    Raises:
        OSError: the address cannot be used.
        ValueError: it is that of the API, or other machines could see prompts there without a key.
    """
    if config.metrics_port is None:
        yield None
        return
    with tcp_listener(config.metrics_host, config.metrics_port) as listener:
        if _share_an_address(listener, api_listener):
            raise ValueError(f"metrics_port: expected another port than that of the API, got {config.metrics_port}")
        if tenants.open_to_all and not is_private(listener) and config.metrics_key is None:
            raise ValueError(
                f"metrics_host: whoever can reach {config.metrics_host} could see prompts, since there are no API keys; set "
                "metrics_key"
            )
        yield listener


def _share_an_address(one: socket.socket, other: socket.socket) -> bool:
    """Whether two bound sockets could be connected to by one address. The system refuses only the second that listens."""
    if socket.AF_UNIX in (one.family, other.family):
        return False
    (host, port), (other_host, other_port) = one.getsockname()[:2], other.getsockname()[:2]
    return port == other_port and (host == other_host or not _ALL_HOSTS.isdisjoint((host, other_host)))


def _open_locked(path: Path) -> BinaryIO:
    """A file that no other process locks while it is open. It is made if there is none, and only read: others may own it.

    Raises:
        FileNotFoundError: there is no folder for it.
        OSError: it cannot be opened, or another process has locked it.
    """
    with suppress(FileExistsError):
        path.touch(0o644, exist_ok=False)
    try:
        with ExitStack() as opened:
            file = opened.enter_context(path.open("rb"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            opened.pop_all()
    except BlockingIOError as error:
        raise OSError(os.strerror(errno.EADDRINUSE)) from error
    except OSError as error:
        raise OSError(f"its lock {path}: {error.strerror}") from error
    return file


def listen(listener: socket.socket, backlog: int) -> None:
    """Have a bound socket take connections.

    Args:
        backlog: connections that may wait to be accepted.

    Raises:
        OSError: another process listens there. Both could be bound, since neither listened.
    """
    try:
        listener.listen(backlog)
    except OSError as error:
        address = address_of(listener, encrypted=False).removeprefix("http://")
        raise OSError(f"cannot listen on {address}: {error.strerror or error}") from error


def is_private(listener: socket.socket) -> bool:
    """Whether only processes of this machine can connect."""
    if listener.family == socket.AF_UNIX:
        return True
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def address_of(listener: socket.socket, *, encrypted: bool) -> str:
    """Where clients find it, such as "http://127.0.0.1:8000" or "unix:/run/radixkv.sock"."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if encrypted else 'http'}://" + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _is_left_over(path: Path) -> bool:
    """Whether there is a socket without a listener, left by a process that was killed."""
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return True
    return False
