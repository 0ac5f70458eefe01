"""How often drafts prove right: learned for each source and strength, over all requests and for each request separately.

Drafts that were not verified are compared with the tokens that came, too. So a source that was bad can prove good again
without costing rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.drafting.drafter import Draft

# Assumed rate of a source and strength of which nothing is known yet, with the weight of so many tokens seen.
_FIRST_RATE = 0.5
_FIRST_WEIGHT = 4.0
# Weight of what all requests have shown, in tokens, beside what this request has shown.
_SHARED_WEIGHT = 4.0
# Most pairs of source and strength whose shared rates are kept: a user's drafter may give any number as a strength.
_MAX_SHARED = 4096
# What was seen so many tokens ago counts by a factor of e less.
_SHARED_MEMORY = 2000.0
_REQUEST_MEMORY = 32.0


class _Rate:
    """The share of right tokens among drafted ones before which all were right."""

    def __init__(self) -> None:
        self.right = 0.0
        self.seen = 0.0

    def add(self, right: int, seen: int, memory: float) -> None:
        keep = max(0.0, 1.0 - seen / memory)
        self.right = self.right * keep + right
        self.seen = self.seen * keep + seen


# What one sequence's drafts have shown, by source and strength.
RequestRates = dict[tuple[str, int], _Rate]


class AcceptanceRates:
    """What the drafts of all requests have shown, by source and strength."""

    def __init__(self) -> None:
        self._rates: dict[tuple[str, int], _Rate] = {}

    def rate(self, source: str, strength: int, request: RequestRates) -> float:
        """How likely a drafted token is right if all before it are, above 0 and below 1."""
        shared = self._rates.get((source, strength))
        right, seen = (0.0, 0.0) if shared is None else (shared.right, shared.seen)
        rate = (right + _FIRST_RATE * _FIRST_WEIGHT) / (seen + _FIRST_WEIGHT)
        own = request.get((source, strength))
        if own is not None:
            rate = (own.right + rate * _SHARED_WEIGHT) / (own.seen + _SHARED_WEIGHT)
        return min(max(rate, 1e-3), 0.999)

    def learn(self, source: str, draft: Draft, tokens: Sequence[int], request: RequestRates) -> None:
        """Compare a draft, verified or not, with the tokens that came from its first position on."""
        length = min(len(draft.token_ids), len(tokens))
        if not length:
            return
        right = matching(draft.token_ids, tokens)
        seen = min(right + 1, length)
        of = source, draft.strength
        if of not in self._rates and len(self._rates) >= _MAX_SHARED:
            del self._rates[next(iter(self._rates))]
        self._rates.setdefault(of, _Rate()).add(right, seen, _SHARED_MEMORY)
        request.setdefault(of, _Rate()).add(right, seen, _REQUEST_MEMORY)


def matching(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """How many leading tokens two sequences have in common."""
    count = 0
    for a, b in zip(draft, tokens, strict=False):
        if a != b:
            break
        count += 1
    return count
