"""How fast an engine computes prompts, as it says itself.

Only the engine knows which tokens it has computed in which time, for all routers that send it requests. From outside, the
time to the first token of a prompt is that of the prompts before it, too, and of some of these a router may know nothing.
"""

from __future__ import annotations

from radixkv.routing.decayed_rate import DecayedRate

# Fewer tokens say nothing of what a token costs: a step has costs of its own.
_MIN_TOKENS = 32


class PrefillRate:
    """Learns it from steps of which prompts are at least half."""

    def __init__(self) -> None:
        self._rate = DecayedRate()

    def observe_step(self, num_prompt_tokens: int, num_tokens: int, seconds: float) -> None:
        """A step is done.

        Args:
            num_prompt_tokens: that it computed.
            num_tokens: all that it computed.
            seconds: that it took.
        """
        if num_prompt_tokens >= max(_MIN_TOKENS, num_tokens / 2):
            self._rate.observe(num_prompt_tokens, seconds)

    @property
    def seconds_per_token(self) -> float | None:
        """What a token cost of late; None: there was no such step."""
        return self._rate.seconds(1)
