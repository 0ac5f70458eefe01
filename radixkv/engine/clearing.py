"""Forgets what is cached for some namespaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from radixkv.cache import PrefixCache
from radixkv.namespaces import is_derived


class Cleared(NamedTuple):
    """What clearing has done.

    Attributes:
        namespaces: how many were cleared.
        freed_blocks: blocks that have no owner any more.
        blocks_in_use: blocks that live sequences use, or that are pinned.
        cached_blocks: blocks that are still cached.
    """

    namespaces: int
    freed_blocks: int
    blocks_in_use: int
    cached_blocks: int


@dataclass(frozen=True, slots=True)
class NamespaceSelection:
    """Which namespaces are meant.

    Attributes:
        name: of one namespace; None: all.
        derived: whether to include those derived from it, see `radixkv.namespaces`.
    """

    name: str | None
    derived: bool = True

    def __contains__(self, namespace: str) -> bool:
        if self.name is None or namespace == self.name:
            return True
        return self.derived and is_derived(namespace, self.name)


ALL_NAMESPACES = NamespaceSelection(None)


def clear(cache: PrefixCache, selection: NamespaceSelection) -> Cleared:
    """Forget what is cached for the selected namespaces, in tiers too; those always clear a whole `namespace_group`."""
    namespaces = [name for name in cache.namespaces if name in selection]
    num_freed = 0 if selection.name is None else sum(map(cache.clear, namespaces))
    num_freed += cache.clear(selection.name)  # even if nothing is cached any more: tiers may have something
    num_idle = cache.num_evictable_blocks
    return Cleared(len(namespaces), num_freed, cache.num_held_blocks - num_idle, num_idle)
