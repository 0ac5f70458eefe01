"""How fast an engine computes prompts, as it says itself.

Only the engine knows which tokens it has computed in which time, for all routers that send it requests. From outside, the
time to the first token of a prompt is that of the prompts before it, too, and of some of these a router may know nothing.
"""

from __future__ import annotations

# Of a step's weight, what is left after the next one.
_DECAY = 0.8
# Fewer tokens say nothing of what a token costs: a step has costs of its own.
_MIN_TOKENS = 32


class PrefillRate:
    """Learns it from steps of which prompts are at least half."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._num_tokens = 0.0

    def observe_step(self, num_prompt_tokens: int, num_tokens: int, seconds: float) -> None:
        """A step is done.

        Args:
            num_prompt_tokens: that it computed.
            num_tokens: all that it computed.
            seconds: that it took.
        """
        if num_prompt_tokens >= max(_MIN_TOKENS, num_tokens / 2):
            self._seconds = _DECAY * self._seconds + seconds
            self._num_tokens = _DECAY * self._num_tokens + num_prompt_tokens

    @property
    def seconds_per_token(self) -> float | None:
        """Of late; None: there was no such step."""
        return self._seconds / self._num_tokens if self._num_tokens else None
