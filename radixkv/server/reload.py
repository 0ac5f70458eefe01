"""SIGHUP: files are reread while the process goes on."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType

from radixkv.errors import EngineDeadError
from radixkv.scheduling.tenant_share import TenantShare
from radixkv.server.access.keys import read_keys_file
from radixkv.server.access.tenants import Tenants

_log = logging.getLogger(__name__)


class ReloadSignal:
    """Handles SIGHUP, which would otherwise end the process. One that comes before `set_handler` is not lost.

    A context manager, to be entered in the main thread.
    """

    def __init__(self) -> None:
        self._has_come = False

    def __enter__(self) -> ReloadSignal:
        self._earlier = signal.signal(signal.SIGHUP, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGHUP, self._earlier)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._has_come = True

    def set_handler(self, reload: Callable[[], object] | None) -> None:
        """Call this at SIGHUP from now on, in the running loop; at once, and once, if one has come before.

        Args:
            reload: what is called; None: there is nothing to reload, which is logged.
        """
        reload = reload or _nothing_to_reload
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
        if self._has_come:
            self._has_come = False
            reload()


def _nothing_to_reload() -> None:
    _log.info("SIGHUP: there is no file to read again")


class KeysReload:
    """Rereads the file of keys; a bad file changes nothing and logs one error."""

    def __init__(
        self, path: Path, tenants: Tenants, set_shares: Callable[[Mapping[str, TenantShare]], Awaitable[None]]
    ) -> None:
        self._path = path
        self._tenants = tenants
        self._set_shares = set_shares
        self._sending: set[asyncio.Future[None]] = set()

    def __call__(self) -> None:
        try:
            keys = read_keys_file(self._path)
            self._tenants.replace_keys(keys)
        except (OSError, ValueError) as error:
            _log.error("keys are kept as they were: %s", error)
            return
        _log.info("%d keys read from %s", len(keys), self._path)
        # Not awaited: an earlier reload may wait for a replica that hangs. They begin in order, which their receiver keeps.
        sending = asyncio.ensure_future(self._send(self._tenants.shares))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def _send(self, shares: Mapping[str, TenantShare]) -> None:
        try:
            await self._set_shares(shares)
        except EngineDeadError:
            pass  # it admits no requests any more, and its own end is reported elsewhere
        except Exception as error:
            _log.error("the shares of keys are as they were: %s", error)
