"""How many requests each tenant may have unfinished, so that no burst leaves no place for the others.

A place that is taken cannot be taken back: its client has been told yes. So a tenant may have only so many times the places
that are still free (dynamic thresholds, Choudhury and Hahne 1998, which share the memory of a switch among its ports)::

    320 places, nobody else        240 for one that wants all, 80 stay free
    three that want all            96 each, 32 stay free
    a fourth comes                 may have 3 x 32, and the free ones become fewer for all

What one tenant does not need, the others have, down to the few that wait for who comes next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from radixkv.scheduling.tenant_share import TenantShare, share_of

# A tenant of mean weight may have so many times what is free.
_PLACES_PER_FREE_PLACE = 3


class QueuePlaces:
    """Counts the unfinished requests by tenant.

    Args:
        num_places: for all tenants; None: any number.
        tenants: what each may have, see `share_of`. The only tenant may have all places: one that is named alone here, or the
            nameless one.
    """

    def __init__(self, num_places: int | None, tenants: Mapping[str, TenantShare]) -> None:
        self.num_places = num_places
        self.tenants = tenants
        self._taken: Counter[str] = Counter()

    def refusal(self, tenant: str, count: int) -> str | None:
        """Why ``tenant`` may not have ``count`` more places now; None: it may."""
        if self.num_places is None:
            return None
        num_taken = self._taken.total()
        if num_taken + count > self.num_places:
            return f"{num_taken} requests are unfinished, and at most {self.num_places} may be"
        if {tenant, *self.tenants, *self._taken} == {tenant} and (not tenant or tenant in self.tenants):
            return None
        weights = {other: share_of(other, self.tenants).weight for other in {tenant, *self._taken}}
        of_mean = weights[tenant] * len(weights) / sum(weights.values())
        allowed = _PLACES_PER_FREE_PLACE * of_mean * (self.num_places - num_taken)
        if self._taken[tenant] + count > allowed:
            return (
                f"{self._taken[tenant]} requests of yours are unfinished, of {num_taken} in all; "
                f"the remaining {self.num_places - num_taken} places are kept for others"
            )
        return None

    def take(self, tenant: str, count: int) -> None:
        """Take places."""
        self._taken[tenant] += count

    def give_back(self, tenant: str, count: int = 1) -> None:
        """Give back places."""
        self._taken[tenant] -= count
        if not self._taken[tenant]:
            del self._taken[tenant]
