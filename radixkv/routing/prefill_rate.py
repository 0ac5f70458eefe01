"""How fast an engine computes prompts, as measured by itself.

Only the engine can measure how many tokens it computes in what time, for all routers that send it requests. Seen from
outside, the time to a prompt's first token includes the prompts before it, some of which other routers have sent.
"""

from __future__ import annotations

from radixkv.routing.decayed_rate import DecayedRate

# A step of fewer prompt tokens is no measure of the cost of a token: a step has a cost of its own.
_MIN_TOKENS = 32


class PrefillRate:
    """Measures that speed in steps whose tokens are at least half prompt tokens."""

    def __init__(self) -> None:
        self._rate = DecayedRate()

    def observe_step(self, num_prompt_tokens: int, num_tokens: int, seconds: float) -> None:
        """A step is done.

        Args:
            num_prompt_tokens: prompt tokens that it computed.
            num_tokens: all tokens that it computed.
            seconds: how long it took.
        """
        if num_prompt_tokens >= max(_MIN_TOKENS, num_tokens / 2):
            self._rate.observe(num_prompt_tokens, seconds)

    @property
    def seconds_per_token(self) -> float | None:
        """The recent cost of a token; None: there was no such step yet."""
        return self._rate.seconds(1)
