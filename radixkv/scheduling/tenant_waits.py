"""Tenants of which nothing can start for now: all that could be admitted waits for prefixes. A step does not look at them.

::

    all of a tenant's candidates wait ── noted ──> not in turn ── a wait is over, or its queue changes ──> in turn again

What ends a wait is found out without looking at the groups: one prompt in progress stands for all that wait for the same
part of it, and of a load or a look-up it is known when it is done, or takes too long.
"""

from __future__ import annotations

from collections.abc import Sequence

from sortedcontainers import SortedDict

from radixkv.scheduling.fair_shares import FairShares, WaitsFor
from radixkv.scheduling.in_flight_prefixes import InFlightPrefixes
from radixkv.scheduling.prefix_loads import PrefixLoads
from radixkv.scheduling.request import SequenceGroup


class TenantWaits:
    """Who waits for what, among the tenants of which nothing can start.

    Args:
        shares: where these tenants lose their turns, and get them back.
        loads: from tiers below the pool; None: there are none.
    """

    def __init__(self, shares: FairShares, in_flight: InFlightPrefixes, loads: PrefixLoads | None) -> None:
        self._shares = shares
        self._in_flight = in_flight
        self._loads = loads
        # By owner and length. A tenant is in several if its groups wait for several; and stays, if its queue changes, until
        # these are over.
        self._for_prefixes: dict[SequenceGroup, SortedDict[int, set[str]]] = {}
        self._for_loads: dict[SequenceGroup, None] = {}

    def add(self, tenant: str, candidates: Sequence[SequenceGroup], first: SequenceGroup) -> None:
        """All candidates of a tenant wait for prefixes, each of which is in flight, or looked for, or loaded.

        Args:
            candidates: those whose waits were not noted before.
            first: of its queue; one of the candidates.
        """
        for group in candidates:
            prefix = self._in_flight.awaited_by(group)
            if prefix is None:
                self._for_loads[group] = None
            else:
                by_length = self._for_prefixes.setdefault(prefix.owner, SortedDict())
                by_length.setdefault(prefix.num_tokens, set()).add(tenant)
        in_flight = self._in_flight.awaited_by(first) is not None
        self._shares.set_waits_for(tenant, WaitsFor.PREFIX if in_flight else WaitsFor.LOAD)

    def forget(self, group: SequenceGroup) -> None:
        """``group`` no longer waits; its tenant is in turn, if others of its groups do."""
        self._for_loads.pop(group, None)

    def end_for_prefixes(self, owner: SequenceGroup | None) -> bool:
        """Whether prefixes are no longer in flight for which tenants waited; these are in turn again.

        Args:
            owner: whose prefixes to check; None: those of all owners.
        """
        owners = list(self._for_prefixes) if owner is None else [owner]
        ended = [self._end_for_prefixes_of(each) for each in owners]
        return any(ended)

    def _end_for_prefixes_of(self, owner: SequenceGroup) -> bool:
        prefixes = self._for_prefixes.get(owner)
        if prefixes is None:
            return False
        is_over, num_not_awaited = False, self._in_flight.num_not_awaited(owner)
        while prefixes and prefixes.peekitem(0)[0] <= num_not_awaited:
            for tenant in prefixes.popitem(0)[1]:
                self._shares.set_waits_for(tenant, WaitsFor.TURN)
            is_over = True
        if not prefixes:
            del self._for_prefixes[owner]
        return is_over

    def end_for_loads(self) -> bool:
        """The same of loads and look-ups."""
        over = [] if self._loads is None else self._loads.over(self._for_loads)
        for group in over:
            del self._for_loads[group]
            self._shares.set_waits_for(group.request.tenant, WaitsFor.TURN)
        return bool(over)
