"""What something costs of late, learned from what it cost each time."""

from __future__ import annotations

# Share of an observation's weight that is left after the next one.
_DECAY = 0.8


class DecayedRate:
    """Seconds for each unit, where an observation counts for less with each one that follows it."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._count = 0.0

    def observe(self, count: int, seconds: float) -> None:
        """So many units took so long; 0 units: the seconds were spent in vain."""
        self._seconds = _DECAY * self._seconds + seconds
        self._count = _DECAY * self._count + count

    def fade(self, factor: float) -> None:
        """Believe in a cost that is lower by a factor, so that what was dear is tried again."""
        self._seconds *= factor

    def seconds(self, count: int) -> float | None:
        """What so many units are expected to take; None: nothing is known. Where all was in vain, that was for one unit."""
        return None if not self._seconds else self._seconds / max(self._count, 1.0) * count
