"""The interface of eviction policies: what the cache calls, and what a policy may read of a leaf."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol, runtime_checkable


class EvictableLeaf(Protocol):
    """What a policy may read of a leaf. While it is in the index, ``num_blocks``, ``depth`` and ``parent_uses`` may change.

    No method is called for such a change: a leaf gives up blocks from its tail, is cut in two by a prompt that leaves it, or
    its parent is used.

    Attributes:
        last_use: the cache's clock, in seconds, when a sequence or load last began or ended here or below, or a pin began.
        uses: how many sequences, pins and loads from elsewhere began with it, the one that computed it included. Under a
            learning policy, a prefix that is recomputed while its eviction is remembered (`EvictedPrefixes`) keeps its count.
        priority: retention priority: the highest that a sequence which used it was opened with. A policy that uses it
            keeps a HIGHER number LONGER.
        group: a learning policy's own note, which outlives the leaf's eviction.
    """

    last_use: float
    uses: int
    priority: int
    group: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the leaf's edge."""

    @property
    def depth(self) -> int:
        """Blocks of the prefix before it."""

    @property
    def parent_uses(self) -> int:
        """``uses`` of its parent: not less than its own, except below a root that was removed and made again."""


@runtime_checkable
class EvictionPolicy(Protocol):
    """An index of evictable leaves: the base of every policy, those of users included.

    The cache adds and removes leaves as they become evictable and cease to be, so a policy never walks over the tree.
    A policy with the methods of `LearningPolicy` or `ClockedPolicy` is notified of more.
    """

    def add(self, leaf: EvictableLeaf) -> None:
        """``leaf``, which is not in the index, may be evicted from now on."""

    def remove(self, leaf: EvictableLeaf) -> None:
        """``leaf``, which is in the index, is in use again or evicted."""

    def next_leaf(self) -> EvictableLeaf:
        """The leaf that should give up blocks first; it stays in the index, which is not empty."""

    def leaves(self) -> Collection[EvictableLeaf]:
        """Every leaf in the index, in no order."""


@runtime_checkable
class LearningPolicy(EvictionPolicy, Protocol):
    """A policy that is also notified how long prefixes are idle before their next use, leaves and inner nodes alike.

    A node is idle from its ``last_use`` to its next use: whether it is still cached by then, or was evicted and is
    recomputed. A policy that has `TreeObserver.on_remove` or `TreeObserver.on_clear` is notified of these, too.
    """

    def on_idle(self, node: EvictableLeaf) -> None:
        """``node`` is idle since its ``last_use``: just now, or before the end of the last pin that kept it.

        Called before `add` where it is a leaf; may set ``node.group``.
        """

    def on_reuse(self, group: int, num_blocks: int, idle_since: float, now: float, evicted: bool) -> None:
        """Idle or evicted blocks are used again.

        Args:
            group: what the policy had noted in their node.
            num_blocks: how many.
            idle_since: by the cache's clock, in seconds.
            now: likewise.
            evicted: whether they have to be recomputed.
        """


@runtime_checkable
class ClockedPolicy(EvictionPolicy, Protocol):
    """A policy that compares times with the present, and so needs the clock of its cache."""

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Called once by the cache, before anything else. ``clock`` returns seconds."""
