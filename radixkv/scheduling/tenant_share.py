"""What a tenant may have. Kept apart from `fair_shares`, because it needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from radixkv.cache.arguments import check_count, is_number


@dataclass(frozen=True, slots=True)
class TenantShare:
    """A tenant's share of the engine, and its limits.

    Attributes:
        weight: its share, relative to the other tenants' weights.
        max_num_seqs: most sequences that it may run at the same time, even if slots are idle; None: any number.
        max_cached_share: part of all blocks, from 0 to 1, that it may keep cached while others need blocks: any excess
            is evicted first (`PrefixCache.limit_owners`); None: no limit.

    Raises:
        ValueError: a value is impossible; the message names it.
    """

    weight: float = 1.0
    max_num_seqs: int | None = None
    max_cached_share: float | None = None

    def __post_init__(self) -> None:
        if not (is_number(self.weight) and 0 < self.weight < float("inf")):
            raise ValueError(f"weight: expected a number above 0, got {self.weight!r}")
        if self.max_num_seqs is not None:
            check_count("max_num_seqs", self.max_num_seqs, 1)
        share = self.max_cached_share
        if share is not None and not (is_number(share) and 0 <= share <= 1):
            raise ValueError(f"max_cached_share: expected a number from 0 to 1, got {share!r}")


_EQUAL_SHARE = TenantShare()


def share_of(tenant: str, tenants: Mapping[str, TenantShare]) -> TenantShare:
    """What a tenant may have: one that is not named has a weight of 1 and no limit."""
    return tenants.get(tenant, _EQUAL_SHARE)
