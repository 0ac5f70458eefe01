"""A recent average cost, by single observations."""

from __future__ import annotations

# Share of an observation's weight that is left after the next one.
_DECAY = 0.8


class DecayedRate:
    """Seconds per unit; an observation counts less with each one that follows it."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._count = 0.0

    def observe(self, count: int, seconds: float) -> None:
        """Note that ``count`` units took ``seconds``; 0 units: the seconds were spent in vain."""
        self._seconds = _DECAY * self._seconds + seconds
        self._count = _DECAY * self._count + count

    def fade(self, factor: float) -> None:
        """Multiply the estimated cost by ``factor``, so that what was expensive is tried again."""
        self._seconds *= factor

    def seconds(self, count: int) -> float | None:
        """Expected seconds for ``count`` units; None: unknown. If all were spent in vain, they count as those of one unit."""
        return None if not self._seconds else self._seconds / max(self._count, 1.0) * count
