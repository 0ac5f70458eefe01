"""Which tenant is served next, and whose groups are preempted: fair shares of sequences, tokens and blocks.

Every tenant has a virtual counter of the service that it received, divided by its weight; of the tenants that wait, the
one with the smallest counter is admitted next (virtual token counters, VTC: Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024). What is counted is work: tokens that a prompt reuses from the cache count little (locality-aware fair
scheduling: Cao et al. 2025). When a tenant begins to wait, its counter is lifted to the smallest among those that wait: it
has no claim to what it did not use before::

    counter   A 900   B 700   C 300, idle        C comes:   A 900   B 700   C 700   ->   C or B, then A

So idle shares go to tenants that need them, and the counters of two tenants that always wait never differ by more than the
work of two batches (and of one step more, see below), whatever they ask for.

A counter alone cannot take back what is in use: a tenant that was alone holds every sequence when a second one comes. Here
preemption is cheap, because what a sequence computed stays in the cache. So when sequences or blocks run short, a group
comes first if its tenant would stay within its share of them, and is not ahead of others by more than a step's tokens; groups
of the tenant that is furthest above its own share are preempted to make room for it (see `tenant_usage`). Shares of sequences
are weighted max-min fair: a tenant that wants less than an equal share gets what it wants, and the others divide the rest.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from sortedcontainers import SortedList

from radixkv.scheduling.request import Request, SequenceGroup
from radixkv.scheduling.tenant_share import TenantShare, share_of

# The cost of a token, by kind. A generated one takes a step's latency and a slot (the weights are those of the VTC paper).
COMPUTED_TOKEN_COST = 1.0
GENERATED_TOKEN_COST = 2.0
REUSED_TOKEN_COST = 1 / 16
# In addition to computing it, for a prompt token whose log-probability is wanted: a product with the whole vocabulary, and a
# search in it. On a CPU, SmolLM2-135M in float32 took 1.45 to 1.53 times as long with them as without.
PROMPT_LOGPROB_COST = 0.5

_DEFAULT_WEIGHT = TenantShare().weight


class WaitsFor(enum.Enum):
    """What a tenant with waiting groups waits for; see `tenant_waits`."""

    TURN = enum.auto()  # nothing else, as far as is known
    LOAD = enum.auto()  # all that could start waits for prefixes: the first group of its queue for a load, or a look-up
    PREFIX = enum.auto()  # the same, but the first one for a prefix in flight


class Turn(NamedTuple):
    """A waiting tenant, and what the order of these depends on.

    Attributes:
        counter: of the tenant.
        num_seqs: that wait. Among equal counters, the tenant that wants least goes first: that hardly delays the others.
        charged_at: among tenants that are equal in this, too, the one that was charged longest ago goes first.
        began: serial number of when it began to wait, which makes the order total.
        tenant: its name.
    """

    counter: float
    num_seqs: int
    charged_at: int
    began: int
    tenant: str


class FairShares:
    """The tenants' counters of one busy period, and the order in which those that wait are served."""

    def __init__(self, tenants: Mapping[str, TenantShare] | None = None) -> None:
        self.set_tenants(tenants or {})
        self._counters: dict[str, float] = {}
        self._charged_at: dict[str, int] = {}
        self._num_charges = 0
        # Kept up to date: sorting all that wait for each that is served would take time that grows with their square.
        self._turns: dict[str, tuple[Turn, WaitsFor]] = {}
        self._orders: dict[WaitsFor, SortedList[Turn]] = {waits_for: SortedList() for waits_for in WaitsFor}
        self._num_changes = 0  # of who waits for what
        self._beginnings = itertools.count()

    def set_tenants(self, tenants: Mapping[str, TenantShare]) -> None:
        """Set what each tenant may have."""
        self._tenants = tenants
        self._weights = {tenant: share.weight for tenant, share in tenants.items()}
        self._limits = {
            tenant: share.max_num_seqs for tenant, share in tenants.items() if share.max_num_seqs is not None
        }

    def share(self, tenant: str) -> TenantShare:
        return share_of(tenant, self._tenants)

    def counter(self, tenant: str) -> float:
        """The service that the tenant received, in costs of a computed token, divided by its weight."""
        return self._counters.get(tenant, 0.0)

    def in_turn(self, *waiting_for: WaitsFor, after: Turn | None = None) -> Iterator[Turn]:
        """The tenants that wait for one of these, in the order in which they are served, whatever changes meanwhile.

        Args:
            after: only those behind this one; None: all.
        """
        while True:
            num_changes = self._num_changes
            orders = [self._orders[each].irange(after, inclusive=(False, True)) for each in waiting_for]
            for after in heapq.merge(*orders):
                yield after
                if self._num_changes != num_changes:
                    break
            else:
                return

    @property
    def floor(self) -> float:
        """The smallest counter of the tenants that wait; 0 if none does."""
        return min((order[0].counter for order in self._orders.values() if order), default=0.0)

    def set_waiting(self, tenant: str, num_seqs: int) -> None:
        """So many sequences of the tenant wait from now on, perhaps others than before; with 0, it is no longer in turn."""
        self._place(tenant, num_seqs, WaitsFor.TURN)

    def waits_for(self, tenant: str) -> WaitsFor:
        """What a tenant waits for of which sequences wait."""
        return self._turns[tenant][1]

    def set_waits_for(self, tenant: str, waits_for: WaitsFor) -> None:
        """What the tenant waits for, if any of its sequences wait, until this is said anew, or other sequences wait."""
        if tenant in self._turns:
            self._place(tenant, self._turns[tenant][0].num_seqs, waits_for)

    def _place(self, tenant: str, num_seqs: int, waits_for: WaitsFor) -> None:
        turn, before = self._turns.pop(tenant, (None, waits_for))
        if turn is not None:
            self._orders[before].remove(turn)
        if num_seqs:
            began = next(self._beginnings) if turn is None else turn.began
            turn = Turn(self.counter(tenant), num_seqs, self._charged_at.get(tenant, -1), began, tenant)
            self._turns[tenant] = turn, waits_for
            self._orders[waits_for].add(turn)
        self._num_changes += 1

    def lift(self, tenant: str, running: Iterable[str]) -> None:
        """The tenant is about to wait: it has no claim to what it did not use before. One that waits already stays as it is.

        Args:
            running: the tenants that have running groups; they count where no tenant waits, so that nothing is scarce.
        """
        floor = self.floor if self._turns else max(map(self.counter, running), default=0.0)
        self._counters[tenant] = max(self.counter(tenant), floor)

    def charge_generated(self, tenant: str, num_tokens: int) -> None:
        """Count tokens of answers that were generated for the tenant."""
        self.charge_cost(tenant, GENERATED_TOKEN_COST * num_tokens)

    def charge_cost(self, tenant: str, cost: float) -> None:
        """Count work that was done for the tenant, in costs of a computed token."""
        self._serve(tenant, cost / self.share(tenant).weight)

    def charge_prompt(self, request: Request, num_tokens: int, num_reused: int) -> None:
        """Count tokens of a request's prompt that are computed from now on, and others that are reused."""
        self._serve(request.tenant, self.prompt_service(request, num_tokens, num_reused))

    def prompt_service(self, request: Request, num_tokens: int, num_reused: int = 0) -> float:
        """By how much `charge_prompt` raises the counter."""
        cost = COMPUTED_TOKEN_COST + (PROMPT_LOGPROB_COST if request.lacks_prompt_logprobs else 0)
        return (num_tokens * cost + num_reused * REUSED_TOKEN_COST) / self.share(request.tenant).weight

    def _serve(self, tenant: str, service: float) -> None:
        self._counters[tenant] = self.counter(tenant) + service
        self._num_charges += 1
        self._charged_at[tenant] = self._num_charges
        if tenant in self._turns:
            turn, waits_for = self._turns[tenant]
            self._place(tenant, turn.num_seqs, waits_for)

    def unused(self, group: SequenceGroup) -> float:
        """The service charged for a running group's prompt, as a whole when it was admitted, that was not rendered yet."""
        return self.prompt_service(group.request, max(0, group.num_pending - 1))

    def refund(self, group: SequenceGroup) -> None:
        """The group is preempted, or ends early: what is `unused` was not served to its tenant after all."""
        self._serve(group.request.tenant, -self.unused(group))

    def reset(self) -> None:
        """Forget the counters: nothing waits and nothing runs, and a busy period is over."""
        self._counters.clear()
        self._charged_at.clear()

    def total_weight(self, tenants: Iterable[str]) -> float:
        """The sum of the tenants' weights."""
        return sum(self._weights_of(tenants))

    def _weights_of(self, tenants: Iterable[str]) -> Iterator[float]:
        """Those of thousands of tenants, without a call for each."""
        return map(self._weights.get, tenants, itertools.repeat(_DEFAULT_WEIGHT))

    def apportion(self, tenant: str, amount: int, total_weight: float) -> int:
        """The tenant's share of ``amount``, at least 1, among tenants that have this total weight, its own included."""
        return max(1, whole_share(amount * self.share(tenant).weight / total_weight))

    def within_limits(self, wanted: Mapping[str, int]) -> dict[str, int]:
        """How many sequences tenants may run of those that they want to run."""
        demands = dict(wanted)
        for tenant in self._limits.keys() & wanted.keys():
            demands[tenant] = min(wanted[tenant], self._limits[tenant])
        return demands

    def level(self, demands: Mapping[str, int], amount: int) -> float:
        """What a tenant of weight 1 may have of ``amount``: a smaller demand is met, and the others share the rest equally.

        (Weighted max-min fairness, by progressive filling: Bertsekas and Gallager, "Data Networks", 1987.)
        """
        # How many tenants have each demand and weight: of thousands, nearly all have the same.
        kinds = Counter(zip(demands.values(), self._weights_of(demands), strict=True))
        rest, weight = float(amount), self.total_weight(demands)
        for (demand, each), count in sorted(kinds.items(), key=lambda kind: kind[0][0] / kind[0][1]):
            if demand * weight > rest * each:
                return rest / weight
            rest -= count * demand
            weight -= count * each
        return float("inf")

    def preempted_last_first(
        self, running: Collection[SequenceGroup], size: Callable[[SequenceGroup], int]
    ) -> list[SequenceGroup]:
        """``running``, given in order of rank, in the reverse of the order in which groups are preempted.

        Preempted first, and so last in the list, is the last group by rank of the tenant with the most.

        Args:
            size: how much a group has of the scarce resource; a tenant's total is divided by its weight.
        """
        by_tenant: dict[str, list[SequenceGroup]] = defaultdict(list)
        for group in running:
            by_tenant[group.request.tenant].append(group)
        if len(by_tenant) < 2:
            return list(running)
        used = {tenant: sum(map(size, groups)) for tenant, groups in by_tenant.items()}

        def order(tenant: str) -> tuple[float, int, int, str]:
            priority, arrival, _ = by_tenant[tenant][-1].rank
            return -used[tenant] / self.share(tenant).weight, -priority, -arrival, tenant

        preempted_first = []
        tenants = [order(tenant) for tenant in by_tenant]
        heapq.heapify(tenants)
        while tenants:
            tenant = tenants[0][-1]
            group = by_tenant[tenant].pop()
            used[tenant] -= size(group)
            preempted_first.append(group)
            if by_tenant[tenant]:
                heapq.heapreplace(tenants, order(tenant))
            else:
                heapq.heappop(tenants)
        return preempted_first[::-1]


def whole_share(share: float) -> int:
    """The whole number of a share; not one less because sums and quotients of weights are rounded."""
    return int(share * (1 + 1e-9))
