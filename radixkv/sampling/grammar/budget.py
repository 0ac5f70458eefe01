"""Limits how much processor time requests with a grammar may take from all others.

A mask takes 10 to 100 us for common grammars, and 20 ms or more for hostile ones, once per token and sequence: for 64
sequences that is a second in which nothing else runs. llguidance's own limits bound a single mask; this bounds their sum.
Within that bound, a tenant is charged for the time of its grammars as it is for tokens (`costs`).
"""

from __future__ import annotations

from collections.abc import Collection

from radixkv.errors import StructuredOutputError

# All grammars of a step together may take this long; each request with one has an equal share.
STEP_SECONDS = 0.05
# A request may take at most this much beyond its shares, in total; what it leaves of a share reduces the total.
REQUEST_SECONDS = 0.5
# Where grammars took nearly all of a step, the rest of it cannot be measured well: this bounds the ratio of the two.
_MAX_COST_RATIO = 50.0


class GrammarBudget:
    """The account of one request; its samples and beams share it."""

    def __init__(self) -> None:
        self._step_seconds = self._stalled_seconds = 0.0
        self._debt_seconds = 0.0

    @property
    def stalled_seconds(self) -> float:
        """How long everything else waited for this request in the present step."""
        return self._stalled_seconds

    @property
    def in_debt(self) -> bool:
        """Whether the request has taken more than its shares: masks for drafts, which are optional, must not add to that."""
        return self._debt_seconds > 0

    def spend(self, seconds: float, stalled: float | None = None) -> None:
        """Note processor time that was taken in the present step.

        Args:
            stalled: seconds for which everything else waited; None: the same.
        """
        self._step_seconds += seconds
        self._stalled_seconds += seconds if stalled is None else stalled

    def discard_step(self) -> None:
        """Discard the time of the present step: it was a replay of tokens whose time was charged elsewhere."""
        self._step_seconds = self._stalled_seconds = 0.0

    def _settle(self, share: float) -> bool:
        self._debt_seconds = max(0.0, self._debt_seconds + self._step_seconds - share)
        self._step_seconds = self._stalled_seconds = 0.0
        return self._debt_seconds <= REQUEST_SECONDS


def costs(budgets: Collection[GrammarBudget], served: float, seconds: float) -> list[float]:
    """What each request is charged for this step: what all would have been served while they waited for it.

    Args:
        budgets: of the requests that had a grammar in the step.
        served: what the step cost all tenants together, in any unit; the result is in the same.
        seconds: that the step took, the grammars' time included.
    """
    stalled = sum(budget.stalled_seconds for budget in budgets)
    if stalled <= 0:
        return [0.0] * len(budgets)
    others = max(seconds - stalled, stalled / _MAX_COST_RATIO)
    return [served * budget.stalled_seconds / others for budget in budgets]


def settle(budgets: Collection[GrammarBudget]) -> list[StructuredOutputError | None]:
    """End a step; returns for each request that had a grammar in it why it must fail, or None."""
    share = STEP_SECONDS / max(1, len(budgets))
    return [
        None
        if budget._settle(share)
        else StructuredOutputError(
            f"structured_outputs: following it took {REQUEST_SECONDS} s of processor time more than the "
            f"{STEP_SECONDS * 1000:.0f} ms per step that all requests with a grammar have in common: make it simpler, or "
            "take fewer samples"
        )
        for budget in budgets
    ]
