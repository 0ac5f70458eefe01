"""The cache's errors; a call that raises one leaves the cache as it was."""

from __future__ import annotations

from typing import Any

from radixkv.cache.counted import counted


class CacheError(Exception):
    """Base of the cache's errors."""


class InvalidArgumentError(CacheError, ValueError):
    """An argument has a type or value that the call does not accept; the message names it."""


class ClosedError(CacheError):
    """A table or pin was used after it was closed or aborted, or with another cache than its own."""


class OutOfBlocks(CacheError):  # noqa: N818 - the field's term for the condition
    """There are not enough blocks, evictable ones included.

    Attributes:
        needed: blocks that the call had to allocate.
        free: blocks that were free.
        evictable: blocks that eviction could have freed.
    """

    def __init__(self, needed: int, free: int, evictable: int) -> None:
        super().__init__(f"{counted(needed, 'block')} needed, {free} free and {evictable} evictable")
        self.needed = needed
        self.free = free
        self.evictable = evictable

    def __reduce__(self) -> tuple[Any, ...]:  # copies would otherwise be made of the message alone
        return type(self), (self.needed, self.free, self.evictable), vars(self)


class PinQuotaExceeded(CacheError):  # noqa: N818 - as above
    """More blocks would be pinned than may be.

    Attributes:
        needed: blocks that would be pinned, those of other pins included.
        quota: blocks that may be pinned.
    """

    def __init__(self, needed: int, quota: int) -> None:
        super().__init__(
            f"{counted(needed, 'block')} would be pinned, {quota} may be: unpin others, or give the cache more blocks"
        )
        self.needed = needed
        self.quota = quota

    def __reduce__(self) -> tuple[Any, ...]:  # as above
        return type(self), (self.needed, self.quota), vars(self)


class InvariantViolation(CacheError, AssertionError):  # noqa: N818 - as above
    """`PrefixCache.check` found the cache's bookkeeping broken; the message says where."""
