"""What is known about a waiting group's prefix in the tiers below the pool.

::

    looked for ──> found ──> waits for a load ──> loaded ──> admitted
        │          │   ^            │               │
        │          v   │            │               └──> found again, if a part was evicted meanwhile
        │         yields            │
        v                           v
    computes what it lacks: finding or loading took too long, or would; or nothing is below

A group that yields leaves the pool's blocks to others (`load_claims`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from radixkv.scheduling.active_loads import ActiveLoad
from radixkv.scheduling.load_claims import Claim
from radixkv.scheduling.request import SequenceGroup
from radixkv.tiers.moves.load import LookUp

# Most loads for a group: what was loaded may be evicted before the group is admitted, and is then loaded again.
_MAX_LOADS = 3


@dataclass(eq=False, slots=True)
class WaitingPrefix:
    """The prefix of one waiting group.

    Attributes:
        look_up: the last look-up; None: all of the prefix was cached when the tree was at ``version``.
        version: the tree's version when there was nothing to load.
        gives_up_at: when the group stops waiting for the look-up, or for a load that another group began.
        active: the load that it waits for.
        num_loads: how many loads were its own.
        was_cut_short: whether one of them ended before all was loaded: a tier lacks what it said it had.
        claim: the blocks that its group will take from the pool.
        computes: whether its group computes what it lacks, whatever the tiers have.
    """

    group: SequenceGroup
    look_up: LookUp | None = None
    version: int = -1
    gives_up_at: float = 0.0
    active: ActiveLoad | None = None
    num_loads: int = 0
    was_cut_short: bool = False
    claim: Claim = field(default_factory=Claim)
    computes: bool = False

    @property
    def is_looked_for(self) -> bool:
        """Whether it is not known yet what is below."""
        return self.look_up is not None and self.look_up.spans is None

    @property
    def waits(self) -> bool:
        """Whether its group waits for a load or a look-up."""
        return not self.computes and (self.active is not None or self.is_looked_for)

    @property
    def may_load(self) -> bool:
        """Whether it may begin another load."""
        return self.num_loads < _MAX_LOADS and not self.was_cut_short

    def end_load(self, is_whole: bool) -> None:
        """The load that it waits for has ended."""
        self.active = None
        self.was_cut_short |= self.num_loads > 0 and not is_whole
