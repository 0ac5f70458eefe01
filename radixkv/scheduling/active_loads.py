"""The loads that hold blocks of the pool, from when these are reserved until they are published or given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from radixkv.cache import BlockTable
from radixkv.cache.tokens import TOKEN_BYTES, common_tokens
from radixkv.outputs import RequestMetrics
from radixkv.scheduling.request import SequenceGroup
from radixkv.tiers.moves.load import Load
from radixkv.tiers.moves.loader import BlockLoader
from radixkv.tiers.moves.rates import Rates


@dataclass(eq=False, slots=True)
class ActiveLoad:
    """A load, the table that holds its blocks, and the groups that wait for it.

    Attributes:
        tokens: of the prefix up to the end of the load, encoded; its last block may be partly filled.
        block_size: tokens per block.
        seconds: how long it should take once the loads before it are done.
        gives_up_at: the time from which it is not worth waiting for.
        waiting: since when each group waits for it.
        is_ending: whether it was cancelled, and ends once no chunk of it is being written.
    """

    load: Load
    table: BlockTable
    tokens: bytes
    block_size: int
    seconds: float
    gives_up_at: float
    waiting: dict[SequenceGroup, float] = field(default_factory=dict)
    is_ending: bool = False

    @property
    def seconds_left(self) -> float:
        """The part of `seconds` for the blocks that are not loaded yet."""
        return 0.0 if self.is_ending else self.seconds * (1 - self.load.num_loaded / len(self.load.block_ids))

    def try_cancel(self) -> bool:
        """See `Load.try_cancel`."""
        self.is_ending = True
        return self.load.try_cancel()

    def num_common(self, tokens: bytes) -> int:
        """Whole blocks that a prefix has in common with this one."""
        return common_tokens(tokens, 0, self.tokens) // self.block_size

    def note_loaded(self, metrics: RequestMetrics, tokens: bytes, media: list[str], seconds: float) -> None:
        """Record in a new request's metrics what was loaded for its prompt, and for how long it waited for that."""
        metrics.load_seconds += seconds
        # A load for another prompt counts in part: its whole blocks that are common.
        num_common = common_tokens(tokens, 0, self.tokens)
        if num_common * TOKEN_BYTES < len(self.tokens):
            num_common -= num_common % self.block_size
        # The last token is always computed, for its logits.
        num_reused = min(num_common, len(tokens) // TOKEN_BYTES - 1)
        num_left = max(0, num_reused - self.load.first * self.block_size)
        for tier, num_blocks, _ in self.load.read:
            used = min(num_blocks * self.block_size, num_left)
            num_left -= used
            if used:
                medium = media[tier]
                metrics.loaded_tokens[medium] = metrics.loaded_tokens.get(medium, 0) + used


class ActiveLoads:
    """The active loads of one engine, in the order in which they are read; for its thread."""

    def __init__(self, loader: BlockLoader, rates: Rates, clock: Callable[[], float]) -> None:
        self._loader = loader
        self._rates = rates
        self._clock = clock
        self._active: list[ActiveLoad] = []
        self._not_begun: list[ActiveLoad] = []
        self._ended: list[ActiveLoad] = []  # whose reads may still be going on

    def __len__(self) -> int:
        return len(self._active)

    def __iter__(self) -> Iterator[ActiveLoad]:
        """The loads now, whatever becomes of them meanwhile."""
        return iter(list(self._active))

    @property
    def has_reserved(self) -> bool:
        """Whether some have got their blocks and wait for `begin`."""
        return bool(self._not_begun)

    @property
    def seconds_left(self) -> float:
        """Until the last of them is done, as expected."""
        return sum(active.seconds_left for active in self._active)

    def add(self, active: ActiveLoad) -> None:
        """A load whose blocks were reserved; it begins with the next `begin`."""
        self._active.append(active)
        self._not_begun.append(active)

    def begin(self, fence: object) -> None:
        """Begin the loads whose blocks were reserved; nothing that was launched after ``fence`` uses these blocks."""
        for active in self._not_begun:
            active.load.fence = fence
            self._loader.load(active.load)
        self._not_begun.clear()

    def end(self, active: ActiveLoad) -> None:
        """Write nothing more of a load. What was read of it shows how fast its tiers are."""
        self._active.remove(active)
        if active in self._not_begun:
            self._not_begun.remove(active)
        elif not active.load.done.is_set():
            self._ended.append(active)
        active.load.cancel()
        for tier, num_blocks, seconds in active.load.read:
            self._rates.observe_load(tier, num_blocks, seconds)

    def reader_hangs(self) -> bool:
        """Whether reading for a load that has ended takes too long: another load would wait behind it."""
        now = self._clock()
        self._ended = [ended for ended in self._ended if not ended.load.done.is_set()]
        return any(now > ended.gives_up_at and ended.load.in_vain(now) is not None for ended in self._ended)

    def shared(self, namespace: str, tokens: bytes, num_cached: int) -> tuple[ActiveLoad, int] | None:
        """A load that brings more blocks of a prefix than the pool has, sooner than computing them would; and how many."""
        seconds = 0.0
        for active in self._active:
            seconds += active.seconds_left
            if active.is_ending or active.table.namespace != namespace:
                continue
            num_common = active.num_common(tokens)
            if num_common <= max(num_cached, active.load.first):
                continue
            computing = self._rates.compute_seconds((num_common - num_cached) * active.block_size)
            if computing is None or seconds <= computing:
                return active, num_common
        return None
