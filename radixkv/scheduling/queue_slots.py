"""How many requests each tenant may have unfinished, so that no burst takes all queue slots.

An accepted request is never refused later: its slot cannot be taken back. So a tenant may hold only a fixed multiple of the
slots that are still free (dynamic thresholds, Choudhury and Hahne 1998, which share the memory of a switch among its ports)::

    320 slots, no other tenant   240 for one that wants all, 80 stay free
    three that want all           96 each, 32 stay free
    a fourth arrives              may have 3 x 32, and the free ones become fewer for all

What one tenant does not need, others may use, except for the few slots that stay free for a tenant yet to come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from radixkv.cache.counted import counted
from radixkv.scheduling.tenant_share import TenantShare, share_of

# A tenant of mean weight may hold this many times the slots that are still free.
_SLOTS_PER_FREE_SLOT = 3


class QueueSlots:
    """Counts the unfinished requests by tenant.

    Args:
        tenants: what each may have, see `share_of`. A sole tenant may have all slots, if it is the only one named here, or
            nameless.
    """

    def __init__(self, tenants: Mapping[str, TenantShare]) -> None:
        self.tenants = tenants
        self._taken: Counter[str] = Counter()

    @property
    def num_taken(self) -> int:
        """Those of all tenants."""
        return self._taken.total()

    def most(self, tenant: str, num_slots: int) -> int:
        """How many of all slots a tenant may have where no other has any."""
        return num_slots if self._is_sole(tenant) else _num_more(0, num_slots, 1.0)

    def refusal(self, tenant: str, count: int, num_slots: int) -> str | None:
        """Why a tenant may not have so many more of all slots now; None: it may."""
        num_taken, own = self.num_taken, self._taken[tenant]
        if num_taken + count > num_slots:
            are = "is" if num_taken == 1 else "are"
            return f"{counted(num_taken, 'request')} {are} unfinished, and at most {num_slots} may be"
        if self._is_sole(tenant) and own == num_taken:
            return None
        weights = {other: share_of(other, self.tenants).weight for other in {tenant, *self._taken}}
        num_free = num_slots - num_taken
        num_more = _num_more(own, num_free, weights[tenant] * len(weights) / sum(weights.values()))
        if count > num_more:
            return (
                f"{counted(own, 'request')} of yours {'is' if own == 1 else 'are'} unfinished, of {num_taken} in all; "
                f"{num_free - num_more} of the remaining {num_free} queue slots are kept for others"
            )
        return None

    def take(self, tenant: str, count: int) -> None:
        """Take slots."""
        self._taken[tenant] += count

    def give_back(self, tenant: str, count: int = 1) -> None:
        """Give back slots."""
        self._taken[tenant] -= count
        if not self._taken[tenant]:
            del self._taken[tenant]

    def _is_sole(self, tenant: str) -> bool:
        return self.tenants.keys() <= {tenant} and (not tenant or tenant in self.tenants)


def _num_more(own: int, num_free: int, of_mean: float) -> int:
    """How many more slots a tenant may take, one by one or at once.

    Args:
        own: those that it has.
        num_free: those that no tenant has.
        of_mean: its weight, as a multiple of the mean weight.
    """
    per_free_slot = _SLOTS_PER_FREE_SLOT * of_mean
    return max(0, int((per_free_slot * (num_free + 1) - own) / (1 + per_free_slot)))
