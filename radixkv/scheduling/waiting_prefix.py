"""What is known about a waiting group's prefix in the tiers below the pool, and the load that it waits for.

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

from radixkv.cache import BlockTable
from radixkv.cache.tokens import TOKEN_BYTES, common_tokens
from radixkv.outputs import RequestMetrics
from radixkv.scheduling.load_claims import Claim
from radixkv.scheduling.request import SequenceGroup
from radixkv.tiers.load import Load, LookUp

# Most loads for a group: what was loaded may be evicted before the group is admitted, and is then loaded again.
_MAX_LOADS = 3


@dataclass(eq=False, slots=True)
class ActiveLoad:
    """A load, the table that holds its blocks, and the groups that wait for it.

    Attributes:
        tokens: of the prefix up to the end of the load, encoded; its last block may be partly filled.
        block_size: tokens per block.
        seconds: that it is expected to take, without the loads before it.
        begun_at: when its blocks were reserved.
        gives_up_at: when it takes longer than it is worth.
        is_ending: whether it was cancelled, and ends once no chunk of it is being written.
    """

    load: Load
    table: BlockTable
    tokens: bytes
    block_size: int
    seconds: float
    begun_at: float
    gives_up_at: float
    waiting: dict[SequenceGroup, None] = field(default_factory=dict)
    is_ending: bool = False

    @property
    def seconds_left(self) -> float:
        """What is left of `seconds` for the blocks that are not loaded yet."""
        return 0.0 if self.is_ending else self.seconds * (1 - self.load.num_loaded / len(self.load.block_ids))

    def try_cancel(self) -> bool:
        """See `Load.try_cancel`."""
        self.is_ending = True
        return self.load.try_cancel()

    def num_common(self, tokens: bytes) -> int:
        """Whole blocks that a prefix has in common with this one."""
        return common_tokens(tokens, 0, self.tokens) // self.block_size

    def note_loaded(self, metrics: RequestMetrics, tokens: bytes, media: list[str], now: float) -> None:
        """Record in a new request's metrics what was loaded for it.

        Args:
            metrics: of the request.
            tokens: of its prompt, encoded; the last is always computed, for its logits.
            media: the name of each tier.
            now: when the load ended.
        """
        metrics.load_seconds += now - self.begun_at
        # A load for another prompt counts in part: its whole blocks that are common.
        num_common = common_tokens(tokens, 0, self.tokens)
        if num_common * TOKEN_BYTES < len(self.tokens):
            num_common -= num_common % self.block_size
        num_reused = min(num_common, len(tokens) // TOKEN_BYTES - 1)
        num_left = max(0, num_reused - self.load.first * self.block_size)
        for tier, num_blocks, _ in self.load.read:
            used = min(num_blocks * self.block_size, num_left)
            num_left -= used
            if used:
                medium = media[tier]
                metrics.loaded_tokens[medium] = metrics.loaded_tokens.get(medium, 0) + used


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
        """Whether its group should not be admitted now."""
        return not self.computes and (self.claim.yields or self.active is not None or self.is_looked_for)

    @property
    def may_load(self) -> bool:
        """Whether it may begin another load."""
        return self.num_loads < _MAX_LOADS and not self.was_cut_short

    def end_load(self, is_whole: bool) -> None:
        """The load that it waits for has ended."""
        self.active = None
        self.was_cut_short |= self.num_loads > 0 and not is_whole
