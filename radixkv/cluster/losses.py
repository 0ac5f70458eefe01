"""Where a request was lost, and when it is sent nowhere any more."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from radixkv.errors import QueueFullError, ReplicasLostError, RequestCrashesError

# A request that ran on so many replicas when they died, without a token in between, is taken to be the reason.
_MAX_DEATHS = 2


class LostError(Exception):
    """A replica broke off; another one may go on.

    Args:
        message: what happened, with its name.
        died: whether its engine crashed while it ran the request.
    """

    def __init__(self, message: str, *, died: bool = False) -> None:
        super().__init__(message)
        self.died = died


class Losses:
    """Of one request, since its last token: what was delivered is not lost again, so that a long answer may be moved often.

    Args:
        request_id: the request's.
        max_attempts: replicas that may lose it.
    """

    def __init__(self, request_id: str, max_attempts: int) -> None:
        self._request_id = request_id
        self._max_attempts = max_attempts
        self._num_lost = 0
        self._dead: list[str] = []
        self._full: QueueFullError | None = None
        self._tried: dict[str, httpx.AsyncClient] = {}
        self._full_at: dict[str, httpx.AsyncClient] = {}

    @property
    def suspected(self) -> bool:
        """Whether it ran on a replica that died."""
        return bool(self._dead)

    def progress(self) -> None:
        """A token has come."""
        if self._tried:
            self._num_lost, self._full = 0, None
            for record in (self._dead, self._tried, self._full_at):
                record.clear()

    def note_loss(self, replica: str, client: httpx.AsyncClient, error: LostError) -> None:
        """A replica lost it.

        Raises:
            RequestCrashesError: it is probably the reason why replicas die.
            ReplicasLostError: that was the last attempt.
        """
        self._tried[replica] = client
        self._num_lost += 1
        if error.died:
            self._dead.append(replica)
        if len(self._dead) >= _MAX_DEATHS:
            raise RequestCrashesError(
                f"request {self._request_id!r} was running on {' and '.join(self._dead)} when they died, at the same token: "
                "it is sent to no other replica"
            ) from error
        if self._num_lost >= self._max_attempts:
            raise ReplicasLostError(
                f"request {self._request_id!r} was lost by {self._num_lost} replicas: {error}"
            ) from error

    def note_refusal(self, replica: str, client: httpx.AsyncClient, full: QueueFullError | None) -> None:
        """A replica does not take it now, because it has too much to do, or takes nothing any more."""
        self._full = full or self._full
        self._full_at[replica] = client

    def refused_by(self, clients: Mapping[str, httpx.AsyncClient]) -> set[str]:
        """Those that do not take it. One that was started anew has a client of its own, and is not meant."""
        return {name for name, client in self._full_at.items() if clients.get(name) is client}

    def lost_by(self, clients: Mapping[str, httpx.AsyncClient]) -> set[str]:
        """Those that lost it."""
        return {name for name, client in self._tried.items() if clients.get(name) is client}

    def raise_if_full(self) -> None:
        """Raise if a replica has too much to do.

        Raises:
            QueueFullError: that of the last one.
        """
        if self._full is not None:
            raise self._full
