"""Which replicas have lost or refused a request, and when it is given up."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import httpx

from radixkv.errors import (
    NoBlocksLeftError,
    QueueFullError,
    ReplicasLostError,
    RequestCrashesError,
    RequestTooLargeError,
)

_log = logging.getLogger(__name__)

# Replicas that may lose a request before its next token.
_MAX_LOSSES = 4
# A request that so many replicas had when they died, without a token in between, is taken to be the cause.
_MAX_DEATHS = 2
# The first and the longest pause before a request is sent again to replicas that had no room. It is sent whole each time, and
# a hundred long ones may wait at a time.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 2.0


class LostError(Exception):
    """A replica broke off; another one may continue.

    Args:
        message: what happened, with the replica's name, for the log.
        died: whether its engine crashed while it had the request; None: it may have, since the connection broke off.
    """

    def __init__(self, message: str, *, died: bool | None = False) -> None:
        super().__init__(message)
        self.died = died


class RefusedError(Exception):
    """A replica does not accept the request now, or cannot go on with it. It is tried again, and that is no loss.

    Args:
        reason: it has too much to do, is too small, or its pins leave no room; None: it takes nothing, or was not reached.
    """

    def __init__(self, reason: QueueFullError | RequestTooLargeError | NoBlocksLeftError | None) -> None:
        super().__init__()
        self.reason = reason


class Losses:
    """How often one request was lost since its last token.

    A delivered token resets the count, so a long answer may move often.

    Attributes:
        has_tokens: whether it has any.
        accepted: whether a replica has ever accepted it.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._num_lost = 0
        self._dead: list[str] = []
        self._full: QueueFullError | None = None
        self._too_large: RequestTooLargeError | None = None
        self._no_blocks: NoBlocksLeftError | None = None
        self._lost_by: dict[str, httpx.AsyncClient] = {}
        self._refused_by: dict[str, httpx.AsyncClient] = {}
        self.accepted = False
        self._pause = _FIRST_PAUSE
        self._until: float | None = None
        self._generation: str | None = None
        self.has_tokens = False

    @property
    def suspected(self) -> bool:
        """Whether a replica had it and died, and it has had no token since."""
        return bool(self._dead)

    def progress(self, generation: str | None) -> None:
        """A token has come, of a replica of this generation."""
        self.has_tokens, self._generation = True, generation
        if self._lost_by or self._refused_by:
            self._num_lost = 0
            self._dead.clear()
            self._lost_by.clear()
            self.forget_refusals()

    def note_acceptance(self) -> None:
        """A replica has accepted it: from now on the others queue it, however full their queues are."""
        self.accepted, self._until, self._pause = True, None, _FIRST_PAUSE

    def note_loss(self, replica: str, client: httpx.AsyncClient, error: LostError, *, died: bool = False) -> None:
        """A replica lost it, and may have died.

        Raises:
            RequestCrashesError: it is probably the cause of the replicas' deaths.
            ReplicasLostError: that was the last attempt.
        """
        _log.info("request %r was lost: %s", self._request_id, error)
        self._lost_by[replica] = client
        self._num_lost += 1
        self._until = None
        if died:
            self._dead.append(replica)
        if len(self._dead) >= _MAX_DEATHS:
            _log.error("request %r is given up: %s died while they had it", self._request_id, " and ".join(self._dead))
            raise RequestCrashesError(
                f"request {self._request_id!r} was on {len(self._dead)} replicas when they died, at the same token: "
                "it is not sent to another one"
            ) from error
        if self._num_lost >= _MAX_LOSSES:
            _log.error("request %r is given up: %s", self._request_id, error)
            raise ReplicasLostError(f"request {self._request_id!r} was lost by {self._num_lost} replicas") from error

    def note_refusal(self, replica: str, client: httpx.AsyncClient, error: RefusedError) -> None:
        """A replica does not accept it now, or cannot go on with it.

        Raises:
            NoBlocksLeftError: it is the second one whose pins leave no room.
        """
        if isinstance(error.reason, NoBlocksLeftError):
            if self._no_blocks is not None:
                raise error.reason
            self._no_blocks = error.reason
        elif isinstance(error.reason, QueueFullError):
            self._full = error.reason
        elif error.reason is not None:
            self._too_large = error.reason
        self._refused_by[replica] = client

    def forget_refusals(self) -> None:
        """Let those that refused it be chosen again: they may have room by now."""
        self._full = self._too_large = self._no_blocks = None
        self._refused_by.clear()

    def next_pause(self) -> float:
        """Seconds before it is sent again to those that refused it: twice as long each time, until one accepts it."""
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        return pause

    def refused_by(self, clients: Mapping[str, httpx.AsyncClient]) -> set[str]:
        """Replicas that refused it. One that was restarted since has a new client, and is not among them."""
        return {name for name, client in self._refused_by.items() if clients.get(name) is client}

    def lost_by(self, clients: Mapping[str, httpx.AsyncClient]) -> set[str]:
        """Replicas that lost it, likewise."""
        return {name for name, client in self._lost_by.items() if clients.get(name) is client}

    def of_other_generations(self, generations: Mapping[str, str]) -> set[str]:
        """Replicas of other generations, by their names, which would not go on with its tokens as they were begun."""
        if not self.has_tokens:
            return set()
        return {name for name, generation in generations.items() if generation != self._generation}

    def wait_until(self, now: float, wait_seconds: float) -> float:
        """Until when to wait, as there is no replica now: for ``wait_seconds`` in all since it was last accepted, or lost.

        Raises:
            NoBlocksLeftError: the pins of a replica leave it no room, and there is no other.
            QueueFullError, RequestTooLargeError: why the last replica refused it, if none has accepted it yet.
            ReplicasLostError: it has waited for so long.
        """
        if self._no_blocks is not None:
            raise self._no_blocks
        if not self.accepted:
            reason = self._full or self._too_large
            if reason is not None:
                raise reason
        if self._until is None:
            self._until = now + wait_seconds
        if now >= self._until:
            if self._full or self._too_large:
                raise ReplicasLostError(
                    f"request {self._request_id!r} was begun, and no replica has room to go on with it"
                )
            begun = " of the generation that began it" if self._generation is not None else ""
            reached = " that takes it" if self._refused_by else ""
            raise ReplicasLostError(f"request {self._request_id!r}: there is no replica{begun}{reached}")
        return self._until
