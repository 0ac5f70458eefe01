"""Leaves a failing medium alone for a while, and longer each time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)

FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0


class Backoff:
    """Says when a failed medium may be tried again, and warns once per outage; any thread may call.

    Args:
        medium: its name in the warning.
        clock: seconds.
    """

    def __init__(self, medium: str, clock: Callable[[], float]) -> None:
        self._medium = medium
        self._clock = clock
        self._lock = threading.Lock()
        self._wait = 0.0
        self._retry_at = 0.0

    @property
    def ready(self) -> bool:
        """Whether the medium may be tried now."""
        return not self._wait or self._clock() >= self._retry_at

    def failed(self, error: Exception) -> None:
        """Leave the medium alone: a second at first, then twice as long each time, a minute at most."""
        with self._lock:
            is_first = not self._wait
            if not is_first and not self.ready:
                return  # a call of another thread, which began before the medium was given up
            self._wait = min(2 * self._wait, LONGEST_SECONDS) or FIRST_SECONDS
            self._retry_at = self._clock() + self._wait
        if is_first:
            _log.warning("%s: %s. Going on without it; it is retried from time to time.", self._medium, error)

    def worked(self) -> None:
        """The medium works, again or still."""
        with self._lock:
            had_failed, self._wait = self._wait > 0, 0.0
        if had_failed:
            _log.warning("%s: works again", self._medium)


def warn_of_uncleared(medium: object) -> None:
    """Warn that a store is closed on which something could not be cleared."""
    _log.warning("%s failed until the end, and what was cleared is still there: clear it again once it works", medium)
