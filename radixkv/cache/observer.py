"""Observers of a radix tree: what is called when blocks enter it, leave it, fall idle or are reused.

::

    RadixTree ── on_insert, on_remove, on_clear ──> EventRecorder      the events of `PrefixCache(events=...)`
              ── on_insert, on_remove, on_clear ──> OwnerLimits        how many blocks each owner has cached
              ── on_insert, on_remove, on_clear ──> BlockMoves         which blocks go to tiers below the pool (`tiers`)
              ── on_insert, on_remove, on_clear ──> RecordFeed         what a replica has cached, for its ingress (`cluster`)
              ── on_remove, on_clear ─────────────> EvictedPrefixes    the memory of evicted prefixes
              ── on_insert, on_split, ... ────────> TreeIndex          where a sequence's last tokens occur (`drafting`)
              ── on_clear ────────────────────────> NamespaceFollowers which token followed which (`drafting`)
              ── on_idle, on_reuse ───────────────> LearningPolicy     a policy that learns reuse times
              ── on_remove, on_clear ─────────────> Adaptive           which compares itself with LRU
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from radixkv.cache.errors import InvalidArgumentError

if TYPE_CHECKING:
    from radixkv.cache.eviction import LearningPolicy
    from radixkv.cache.node import Node


class TreeObserver:
    """Is notified of changes in a `RadixTree`. A subclass overrides the calls that it needs; the others are never made.

    An observer must not change the tree.
    """

    def on_insert(self, node: Node, start: int) -> None:
        """The blocks of ``node`` from index ``start`` on have been added."""

    def on_split(self, upper: Node, lower: Node) -> None:
        """The first blocks of ``lower`` have become those of ``upper``, its new parent."""

    def on_remove(self, node: Node, start: int, evicted: bool) -> None:
        """The blocks of ``node`` from index ``start`` on are about to be removed.

        Args:
            evicted: to free blocks; False where a fuller block replaces a partly filled one.
        """

    def on_clear(self, namespace: str | None, nodes: Sequence[Node]) -> None:
        """A namespace, or every one for None, has been removed with all of its nodes, roots included, parents first."""

    def on_idle(self, node: Node) -> None:
        """The last sequence that used ``node`` has ended."""

    def on_reuse(self, group: int, num_blocks: int, idle_since: float, now: float, evicted: bool) -> None:
        """Idle blocks are in use again, or evicted ones are about to be recomputed: see `LearningPolicy.on_reuse`."""


class Observers:
    """The observers of one tree: for each call of `TreeObserver`, the bound methods to be called, in order.

    Args:
        learner: a policy that learns, which is notified first, once, and always; None: there is none.
        added: others, in the order in which they are notified.
    """

    def __init__(self, learner: LearningPolicy | None, added: Iterable[TreeObserver]) -> None:
        self._learner = learner
        self._added = list(added)
        self._update()

    def add(self, observer: TreeObserver) -> None:
        """Notify this one too, from now on."""
        self._added.append(observer)
        self._update()

    def remove(self, observer: TreeObserver) -> None:
        """Stop notifying one.

        Raises:
            InvalidArgumentError: it was never added.
        """
        if observer not in self._added:
            raise InvalidArgumentError(f"observer: expected one that was added, got {observer!r:.80}")
        self._added.remove(observer)
        self._update()

    def _update(self) -> None:
        first: list[object] = [] if self._learner is None else [self._learner]
        notified = [*first, *(each for each in self._added if each not in first)]
        self.on_insert = handlers(notified, "on_insert")
        self.on_split = handlers(notified, "on_split")
        self.on_remove = handlers(notified, "on_remove")
        self.on_clear = handlers(notified, "on_clear")
        self.on_idle = handlers(notified, "on_idle")
        self.on_reuse = handlers(notified, "on_reuse")


def check_observer(name: str, observer: TreeObserver) -> None:
    """Raise InvalidArgumentError, naming the argument, unless this is a `TreeObserver`."""
    if not isinstance(observer, TreeObserver):
        raise InvalidArgumentError(f"{name}: expected a TreeObserver, got {observer!r:.80}")


def handlers(observers: Iterable[object], call: str) -> tuple[Callable[..., Any], ...]:
    """The observers' bound methods named ``call``, without those inherited from `TreeObserver`, which do nothing.

    The tree keeps one tuple per call, so a call that no observer overrides costs a loop over an empty tuple.
    """
    ignored = getattr(TreeObserver, call)
    return tuple(getattr(each, call) for each in observers if getattr(type(each), call, ignored) is not ignored)
