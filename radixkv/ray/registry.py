"""Where the replicas are, and the secret that they share: replicas register each second, and ingresses ask for the list.

All of it can be lost: a registry that was restarted waits for a replica's report for as long as one that knows the replica,
and says so, so that ingresses keep what they have until then. For the secret it waits for the report of any replica.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# Between two renewals, and between two times that an ingress asks.
RENEWAL_SECONDS = 1.0
# A replica that has not renewed its entry for this long is gone.
LEASE_SECONDS = 10.0
# Some replica, if there is any, has reported within this time.
_SECONDS_TO_FIRST_REPORT = 3.0


@dataclass(frozen=True)
class Listing:
    """What a registry knows.

    Attributes:
        urls: of replicas, by name.
        complete: whether a replica that is not among them is gone; otherwise it may just not have reported yet.
    """

    urls: Mapping[str, str]
    complete: bool

    def after(self, known: Mapping[str, str]) -> dict[str, str]:
        """The urls, by name, of the replicas that may be there.

        Args:
            known: those before this list was asked for.
        """
        return dict(self.urls) if self.complete else {**known, **self.urls}


class Registry:
    """Replicas' addresses by their names, and their secret.

    Args:
        clock: seconds, from any moment on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first_asked = math.inf
        # For each its url, or None where it has left, and until when that is known.
        self._replicas: dict[str, tuple[str | None, float]] = {}
        self._secret: str | None = None

    def secret(self, proposed: str) -> str | None:
        """The secret of all replicas: the one they have, or else the proposed one; None: ask again, one may yet come."""
        if self._secret is None and self._seconds_asked() >= _SECONDS_TO_FIRST_REPORT:
            self._secret = proposed
        return self._secret

    def renew(self, name: str, url: str, secret: str) -> None:
        """A replica is there, for the next `LEASE_SECONDS`, unless it has left: calls may overtake each other.

        Args:
            name: a new one each time that the replica is started.
            url: of its `replica_app`.
            secret: what `secret` gave it.
        """
        self._secret = self._secret or secret
        known, _ = self._replicas.get(name, (url, 0.0))
        if known is not None:
            self._replicas[name] = url, self._clock() + LEASE_SECONDS

    def leave(self, name: str) -> None:
        """A replica takes no more requests; renewals of it that come later are ignored."""
        self._replicas[name] = None, self._clock() + LEASE_SECONDS

    def listing(self) -> Listing:
        """The replicas that are there."""
        now = self._clock()
        self._replicas = {name: known for name, known in self._replicas.items() if known[1] > now}
        urls = {name: url for name, (url, _) in self._replicas.items() if url is not None}
        return Listing(urls, complete=self._seconds_asked() >= LEASE_SECONDS)

    def _seconds_asked(self) -> float:
        """Seconds since it was first asked: no report got here much earlier."""
        now = self._clock()
        self._first_asked = min(self._first_asked, now)
        return now - self._first_asked
