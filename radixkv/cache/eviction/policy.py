"""What an eviction policy is asked, and what it may know."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable


class EvictableLeaf(Protocol):
    """What a policy may know of a leaf. While it is in the index, only ``num_blocks`` and ``depth`` change.

    Attributes:
        last_use: the cache's clock, in seconds, when a sequence last began or ended here or below.
        uses: how many sequences began with it, the one that computed it included; eviction does not make it forgotten
            at once (`EvictedPrefixes`).
        priority: the highest that a sequence which used it was opened with.
        group: a learning policy's own note, which outlives the leaf's eviction.
    """

    last_use: float
    uses: int
    priority: int
    group: int

    @property
    def num_blocks(self) -> int: ...

    @property
    def depth(self) -> int:
        """Blocks of the prefix before it."""

    @property
    def parent_uses(self) -> int:
        """``uses`` of what it hangs from; never less than its own."""


class EvictionPolicy(Protocol):
    """An index of evictable leaves. The cache tells it of each that comes and goes, so nothing ever walks over them."""

    def add(self, leaf: EvictableLeaf) -> None:
        """``leaf`` may be evicted from now on; it is not in the index."""

    def remove(self, leaf: EvictableLeaf) -> None:
        """``leaf``, which is in the index, is in use again or gone."""

    def next_leaf(self) -> EvictableLeaf:
        """The leaf that should give up blocks first; it stays in the index, which is not empty."""

    def leaves(self) -> Collection[EvictableLeaf]:
        """Every leaf in the index, in no order."""


@runtime_checkable
class LearningPolicy(EvictionPolicy, Protocol):
    """A policy that is also told how long prefixes wait for their next use, leaves and inner nodes alike.

    A wait begins when the last sequence that uses a node ends. It ends with the next use, be the node still cached by
    then, or evicted and computed anew.
    """

    def wait_begins(self, node: EvictableLeaf) -> None:
        """Nobody uses ``node`` any more. Called before `add` where it is a leaf; may set ``node.group``."""

    def wait_ends(self, group: int, num_blocks: int, begun_at: float, now: float) -> None:
        """So many blocks, in whose nodes the policy had noted ``group``, are used again; both times in seconds."""
