"""Measures what loading and computing cost, so that a prefix is loaded only where that is faster."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.routing import PrefillRate
from radixkv.routing.decayed_rate import DecayedRate
from radixkv.tiers.stack import Span

# Each time that computing is chosen, the expected cost of loading is multiplied by this: so a slow medium is tried again.
_FADING = 0.95


class Rates:
    """The expected seconds for a block from each tier, and for a computed prompt token.

    Args:
        num_tiers: of the stack.
        prefill_rate: the engine's, measured in its steps.
    """

    def __init__(self, num_tiers: int, prefill_rate: PrefillRate) -> None:
        self._tiers = [DecayedRate() for _ in range(num_tiers)]
        self._prefill = prefill_rate

    def observe_load(self, tier: int, num_blocks: int, seconds: float) -> None:
        """Note how long loading blocks from a tier took; 0 blocks: they were not there after all."""
        self._tiers[tier].observe(num_blocks, seconds)

    def load_seconds(self, spans: Sequence[Span]) -> float | None:
        """What loading is expected to take; None: nothing is known of a tier."""
        total = 0.0
        for span in spans:
            seconds = self._tiers[span.tier].seconds(span.stop - span.start)
            if seconds is None:
                return None
            total += seconds
        return total

    def compute_seconds(self, num_tokens: int) -> float | None:
        """What computing the tokens is expected to take; None: nothing is known."""
        seconds = self._prefill.seconds_per_token
        return None if seconds is None else seconds * num_tokens

    def choose_loading(self, spans: Sequence[Span], num_tokens: int, seconds_before: float) -> bool:
        """Whether the spans should be loaded rather than computed; if nothing is known, they should.

        Args:
            spans: in tiers.
            num_tokens: in their blocks.
            seconds_before: how long a load that is requested now would wait before it begins.
        """
        loading = self.load_seconds(spans)
        computing = self.compute_seconds(num_tokens)
        if loading is None or computing is None or seconds_before + loading <= computing:
            return True
        # If only the wait for other loads speaks against it, the tiers' rates are not in doubt.
        if loading > computing:
            for span in spans:
                self._tiers[span.tier].fade(_FADING)
        return False
