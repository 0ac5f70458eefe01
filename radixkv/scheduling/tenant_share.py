"""What a tenant may have. Apart from `fair_shares`, because it needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TenantShare:
    """What a tenant may have.

    Attributes:
        weight: its share of all, relative to the other tenants' weights.
        max_num_seqs: sequences that it may run side by side, even where no other tenant needs them; None: any number.
        max_cached_share: part of all blocks, from 0 to 1, that it may keep cached while others need blocks: what it has
            beyond is evicted first (`PrefixCache.limit_owners`); None: no limit.

    Raises:
        ValueError: a value is impossible; the message names it.
    """

    weight: float = 1.0
    max_num_seqs: int | None = None
    max_cached_share: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight: expected a number above 0, got {self.weight!r}")
        if self.max_num_seqs is not None and self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs: expected at least 1, got {self.max_num_seqs!r}")
        if self.max_cached_share is not None and not 0 <= self.max_cached_share <= 1:
            raise ValueError(f"max_cached_share: expected a number from 0 to 1, got {self.max_cached_share!r}")


_EQUAL_SHARE = TenantShare()


def share_of(tenant: str, tenants: Mapping[str, TenantShare]) -> TenantShare:
    """What a tenant may have: one that is not named has a weight of 1 and no limit."""
    return tenants.get(tenant, _EQUAL_SHARE)
