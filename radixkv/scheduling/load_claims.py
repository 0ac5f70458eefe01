"""Blocks that waiting groups will take beyond those that loads hold for them, so that no load evicts another's blocks.

A group whose load is running always claims blocks. Once its prefix is loaded, it claims them only if it could have been
admitted in this step or the one before, that is, if it waits for nothing but blocks: otherwise others would leave blocks to
a tenant that has reached its limit. A group that yields claims nothing, so that no two yield to each other; it is overtaken
by others up to a limit, like one that does not fit. Then they wait for it, and it yields no more: otherwise it would wait
for them, too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Claim:
    """What one waiting group claims; `LoadClaims` changes it.

    Attributes:
        num_blocks: blocks that the group will take when it is admitted, besides those that a load holds for it.
        loading: whether a load holds blocks for it.
        yields: whether it leaves blocks to others, until it is looked at again.
        step: the last step in which the group could have been admitted.
        holds_up_others: whether others wait until the group is admitted.
    """

    num_blocks: int = 0
    loading: bool = False
    yields: bool = False
    step: int = -1
    holds_up_others: bool = False


class LoadClaims:
    """The claims of one engine's waiting groups. Their sum is kept, so that no group has to add up all others'."""

    def __init__(self) -> None:
        self._step = 0
        # The claims renewed in this step, and in the one before.
        self._renewed: list[Claim] = []
        self._renewed_before: list[Claim] = []
        self._claims: dict[Claim, int] = {}  # those that were set, and how many blocks of each count now
        self._total = 0

    def begin_step(self) -> None:
        """A step begins: groups that could not be admitted in the last two steps claim nothing."""
        self._step += 1
        lapsing, self._renewed_before, self._renewed = self._renewed_before, self._renewed, []
        for claim in lapsing:
            self._count(claim)

    def renew(self, claim: Claim) -> None:
        """The group is looked at; it decides anew whether it yields."""
        if claim.step != self._step:
            claim.step = self._step
            self._renewed.append(claim)
        claim.yields = False
        self._count(claim)

    def set(self, claim: Claim, num_blocks: int, *, loading: bool) -> None:
        """The group will take so many blocks."""
        claim.num_blocks, claim.loading = num_blocks, loading
        self._claims.setdefault(claim, 0)
        self._count(claim)

    def leave_to_others(self, claim: Claim) -> None:
        """The group yields."""
        claim.yields = True
        self._count(claim)

    def end(self, claim: Claim) -> None:
        """The group is admitted or gone, or computes."""
        self._total -= self._claims.pop(claim, 0)

    def has(self, claim: Claim) -> bool:
        """Whether it was set, and has not ended."""
        return claim in self._claims

    def of_others(self, claim: Claim) -> int:
        """Blocks that others claim, and that the group has to leave to them."""
        return 0 if claim.holds_up_others else self._total - self._claims.get(claim, 0)

    def _count(self, claim: Claim) -> None:
        if claim in self._claims:
            counts = not claim.yields and (claim.loading or claim.step >= self._step - 1)
            self._total -= self._claims[claim]
            self._claims[claim] = claim.num_blocks if counts else 0
            self._total += self._claims[claim]
