"""Which waiting groups start in a step, and which running ones of other tenants are preempted for them.

A group is admitted if its sequences, the blocks of its prompt, and what the running groups will still need
(`decode_growth`) fit together. What did not fit is tried again only when something has changed that could let it fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from radixkv.cache import OutOfBlocks, PrefixCache
from radixkv.scheduling.decode_growth import DecodeGrowth
from radixkv.scheduling.fair_shares import FairShares, WaitsFor
from radixkv.scheduling.in_flight_prefixes import InFlightPrefixes
from radixkv.scheduling.prefix_loads import PrefixLoads
from radixkv.scheduling.request import Request, SequenceGroup
from radixkv.scheduling.sequence_blocks import SequenceBlocks
from radixkv.scheduling.tenant_usage import TenantUsage
from radixkv.scheduling.tenant_waits import TenantWaits
from radixkv.scheduling.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class _RetryWhen:
    """When to retry a group that did not fit: once ``num_blocks`` are available, or the ``occupancy`` has changed."""

    num_blocks: int
    occupancy: tuple[int, int, int]


class Admission:
    """Takes groups out of the waiting queue and opens their block tables; `Scheduler` starts them.

    Args:
        running: the scheduler's running groups, in order of rank; only read here.
        loads: from tiers below the pool; None: there are none.

    Attributes:
        first_without_room: the first group that did not fit in the last step.
    """

    def __init__(
        self,
        cache: PrefixCache,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        running: dict[SequenceGroup, None],
        waiting: WaitingQueue,
        shares: FairShares,
        blocks: SequenceBlocks,
        in_flight_prefixes: InFlightPrefixes,
        loads: PrefixLoads | None,
    ) -> None:
        self._cache = cache
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._running = running
        self._waiting = waiting
        self._shares = shares
        self._blocks = blocks
        self._loads = loads
        self._in_flight_prefixes = in_flight_prefixes
        self._tenant_waits = TenantWaits(shares, self._in_flight_prefixes, loads)
        self._retry_when: dict[SequenceGroup, _RetryWhen] = {}
        self.first_without_room: SequenceGroup | None = None
        self._made_room_for: list[SequenceGroup] = []  # in this step, by preempting other groups
        self._looked_up: set[str] = set()  # the tenants whose queues were looked up in this step
        # The tenant whose group did not fit, so that those behind it in turn wait in this step, and how many of these were
        # tried nevertheless, for short prompts.
        self._last_in_turn: str | None = None
        self._num_tried_behind = 0
        # Of the running groups, while a step admits: counted when first asked for, and kept up to date.
        self._growth: DecodeGrowth | None = None
        self._usage: TenantUsage | None = None
        self._known_occupancy: tuple[int, int, int] | None = None
        self._num_admitted = 0

    def num_blocks_awaited(self, group: SequenceGroup) -> int:
        """Blocks that must be available before a group that did not fit is tried again."""
        return self._retry_when[group].num_blocks

    def begin_step(self) -> None:
        """Forget what was noted for the step before."""
        self._looked_up.clear()
        self._last_in_turn = None
        self._num_tried_behind = 0
        self._in_flight_prefixes.begin_step(self._running if self._waiting else ())
        self.first_without_room = None
        self._growth = None
        # With no slot free, those that wait for loads are looked at only for preempting others, in turn or not.
        self._end_waits(for_loads=bool(self._waiting) and self._num_admissible_seqs > 0)

    def note_preempted(self) -> None:
        """A running group was preempted: what tenants use is counted anew."""
        self._usage = None

    def note_stalled(self, group: SequenceGroup, num_tokens_left: int) -> None:
        """A prompt in progress gets no tokens in this step; so many are left for prompts that fit as a whole."""
        self._in_flight_prefixes.note_stalled(group, num_tokens_left)
        self._end_waits(owner=group)

    def forget(self, group: SequenceGroup) -> None:
        """Forget a group that was started, or is gone."""
        self._in_flight_prefixes.forget(group)
        self._tenant_waits.forget(group)
        if self._loads is not None:
            self._loads.forget(group)
        self._retry_when.pop(group, None)
        if group in self._made_room_for:
            self._made_room_for.remove(group)

    def groups_to_preempt(self) -> list[SequenceGroup]:
        """The groups to preempt so that waiting tenants get their share; see `fair_shares`."""
        self._made_room_for = []
        self._known_occupancy = self._usage = self._growth = None
        if not self._waiting:
            return []
        # The usual case, in every step.
        tenants = self._waiting.tenants
        if len(tenants) == 1 and all(group.request.tenant in tenants for group in self._running):
            return []
        victims, starting = self._make_room()
        if victims:
            self._made_room_for = starting
        if starting:
            self._usage = None  # they are counted in it, and do not run yet
        return victims

    def _make_room(self) -> tuple[list[SequenceGroup], list[SequenceGroup]]:
        """The groups to preempt, and those to start in their place, in this order; the last one may lack blocks even then."""
        usage = self._current_usage()
        # With no tenant above its share, none is preempted for slots; nor for blocks, if all has fitted so far.
        if self._loads is None and not self._retry_when and not usage.exceeds_shares():
            return [], []
        computing = {group.request.tenant for group in self._running if group.num_pending > 1}
        victims: list[SequenceGroup] = []
        starting: list[SequenceGroup] = []
        num_passed = 0  # tenants whose groups wait for loads
        self._in_flight_prefixes.look_at(self._running)
        self._end_waits()
        for tenant in usage.claimants(WaitsFor.TURN, WaitsFor.LOAD):
            # Its prompt in progress comes first: until that ends, a victim would be readmitted in its place.
            if tenant in computing:
                continue
            for group in self._waiting.groups(tenant):
                if not usage.has_claim(group):
                    break
                if self._waits_for_running(group):
                    self._note_waits_for_running(group)
                    break
                may_fit = self._may_fit_now(group)
                more = self._victims_for(group, usage, may_fit)
                if more is None:
                    return victims, starting
                # Only where there can be room: nothing is loaded for groups that cannot start, however many wait.
                if self._waits_for_load(group, would_preempt=bool(more)):
                    num_passed += 1
                    if num_passed == self._waiting.window:
                        return victims, starting
                    break
                if not may_fit:
                    return (victims, starting) if victims else (more, [*starting, group])
                if more:
                    usage.remove(more)
                    victims += more
                    for victim in more:
                        self._in_flight_prefixes.remove(victim)
                    self._end_waits()
                self._in_flight_prefixes.add(group)
                starting.append(group)
                num_uncached = self._waiting.num_uncached(group, look_up=True)
                num_reused = len(group.prefill_token_ids) - num_uncached
                usage.add(group, self._shares.prompt_service(group.request, num_uncached - 1, num_reused))
        return victims, starting

    def _victims_for(self, group: SequenceGroup, usage: TenantUsage, may_fit: bool) -> list[SequenceGroup] | None:
        """Whom to preempt for a group that has a claim; empty: it needs no victims; None: preemption would not make room."""
        if not may_fit:
            return usage.victims_for_blocks(group) or None
        missing = group.num_seqs - (self._max_num_seqs - usage.num_seqs.total())
        return [] if missing <= 0 else usage.victims_for_seqs(group, missing) or None

    def wanting_more(self, tenants: Iterable[str]) -> set[str]:
        """Those whose running and waiting sequences together exceed an equal share, by weight, of all."""
        return self._current_usage().wanting_more(tenants)

    def next_group(self, max_tokens: int | None, before: Request | None) -> SequenceGroup | None:
        """Take the next group that fits out of the queue, and open its tables; None: there is none.

        The caller starts the group before the next call.

        Args:
            max_tokens: of its prompt; None: any number.
            before: only groups that come before this request: more urgent ones of its tenant, and those of tenants that were
                served less. This does not hold for groups that others were preempted for, nor does ``max_tokens``.
        """
        self._known_occupancy = None
        if self._num_admissible_seqs < 1:
            return None
        usage = self._current_usage()
        # First the groups that others were preempted for, or none: otherwise the others would be readmitted in their place.
        for group in self._made_room_for:
            if not usage.exceeds_limit(group) and not self._still_waits(group):
                return group if self._admit(group) else None
        passed: list[SequenceGroup] = []
        last_in_turn, is_behind = self._last_in_turn, False
        for tenant in usage.in_turn():
            is_behind = is_behind or tenant == last_in_turn
            if is_behind:
                # What a long prompt leaves of the step's tokens is for short ones of any tenant. A step tries a few tenants
                # for that, because there may be thousands, and it would try them again beside each prompt in progress.
                if max_tokens is None or self._num_tried_behind >= self._waiting.window:
                    return None
                self._num_tried_behind += 1
            if not usage.may_come_before(tenant, before):
                continue
            admitted, did_not_fit = self._admit_first_of(tenant, max_tokens, before, usage)
            if admitted is not None:
                for other in passed:
                    self._waiting.pass_over(other)
                return admitted
            for group in did_not_fit:
                if usage.may_hold_up_others(group) and not self._waiting.may_be_passed(group):
                    if self._loads is not None:
                        self._loads.hold_up_others(group)
                    self._last_in_turn = tenant
                    return None
            passed += did_not_fit[:1]
            if len(passed) == self._waiting.window:
                self._last_in_turn = tenant
                return None
        return None

    def _admit_first_of(
        self, tenant: str, max_tokens: int | None, before: Request | None, usage: TenantUsage
    ) -> tuple[SequenceGroup | None, list[SequenceGroup]]:
        """Admit a tenant's first candidate that fits; returns it, if there is one, and those before it that did not fit.

        One that leaves blocks to others' loads does not fit, either: as long as others' loads begin, it could wait for ever.
        """
        did_not_fit: list[SequenceGroup] = []
        num_waiting = 0
        candidates = self._waiting.candidates(tenant, look_up=tenant not in self._looked_up)
        self._looked_up.add(tenant)
        for group in candidates:
            if before is not None and tenant == before.tenant and group.request.priority >= before.priority:
                break
            if usage.exceeds_limit(group):
                break
            if self._waits_for_running(group):
                num_waiting += self._in_flight_prefixes.may_wait_out_of_turn(group)
                continue
            if self._loads is not None and self._waits_for_load(group):
                if self._loads.yields(group):
                    did_not_fit.append(group)
                else:
                    num_waiting += self._loads.may_wait_out_of_turn(group)
                continue
            if self._fits_into(max_tokens, group):
                if self._admit(group):
                    return group, did_not_fit
                did_not_fit.append(group)
            if group.started:
                break  # it has begun its answer, which should not stall while new ones begin
        if num_waiting == len(candidates):
            self._tenant_waits.add(tenant, candidates, self._waiting.first(tenant))
        return None, did_not_fit

    def _end_waits(self, for_loads: bool = False, owner: SequenceGroup | None = None) -> None:
        """Tenants whose waits for prefixes (only those of ``owner``, if given) or loads are over are in turn again."""
        over = self._tenant_waits.end_for_prefixes(owner)
        if for_loads:
            over |= self._tenant_waits.end_for_loads()
        if over and self._usage is not None:
            self._usage.look_again()

    def _fits_into(self, max_tokens: int | None, group: SequenceGroup) -> bool:
        """Whether so many tokens are enough for what is not cached of a waiting group's prompt; None: any number."""
        return max_tokens is None or self._waiting.num_uncached(group) <= max_tokens

    def _still_waits(self, group: SequenceGroup) -> bool:
        """Whether a group for which others were preempted waits nevertheless, for a prefix that began since."""
        return self._waits_for_running(group, through_stalls=False) or self._waits_for_load(group)

    def _waits_for_running(self, group: SequenceGroup, through_stalls: bool = True) -> bool:
        """Whether it waits for a prefix that another group computes; one with a load waits for that first, and lacks less."""
        if self._loads is not None and self._loads.is_loading(group) and self._waits_for_load(group):
            return False
        return self._in_flight_prefixes.should_wait(group, through_stalls)

    def _note_waits_for_running(self, group: SequenceGroup) -> None:
        """A group waits for a prefix in flight: its tenant is not in turn meanwhile, if it is known that all others wait."""
        prefix, tenant = self._in_flight_prefixes.awaited_by(group), group.request.tenant
        if prefix is None or prefix.owner not in self._running or group is not self._waiting.first(tenant):
            return  # an owner that is about to start may not fit
        if self._shares.waits_for(tenant) is WaitsFor.LOAD or self._waiting.num_seqs[tenant] == group.num_seqs:
            self._tenant_waits.add(tenant, [group], group)

    def _waits_for_load(self, group: SequenceGroup, would_preempt: bool = False) -> bool:
        """Whether it waits for a look-up or a load, which this advances."""
        return self._loads is not None and self._loads.find_or_load(group, self._num_spare_blocks, would_preempt)

    def _current_usage(self) -> TenantUsage:
        """The usage of the running groups, counted once per step and after preemptions, updated with each admitted group."""
        if self._usage is None:
            self._usage = TenantUsage(
                self._shares,
                self._running,
                self._waiting,
                self._cache,
                self._max_num_seqs,
                burst=self._max_num_batched_tokens,
            )
        return self._usage

    def _decode_growth(self) -> DecodeGrowth:
        """The growth of the running groups, computed once per step, and updated with each admitted group."""
        if self._growth is None:
            self._growth = DecodeGrowth(self._running, self._cache.block_size, self._max_num_batched_tokens)
        return self._growth

    @property
    def _num_admissible_seqs(self) -> int:
        """How many more sequences may run concurrently."""
        return self._max_num_seqs - self._decode_growth().num_seqs

    @property
    def _occupancy(self) -> tuple[int, int, int]:
        """Running groups, those of them whose prompts are in progress, and all admitted so far.

        Decode growth mostly depends on the first two; by the last one, those that run now may not be those that ran, and may
        share other blocks with a waiting group. Counted once for all groups that are retried before one is admitted.
        """
        if self._known_occupancy is None:
            num_prompts = sum(group.num_pending > 1 for group in self._running)
            self._known_occupancy = len(self._running), num_prompts, self._num_admitted
        return self._known_occupancy

    def _may_fit_now(self, group: SequenceGroup) -> bool:
        """Whether something has changed since the group did not fit, if it did not."""
        retry = self._retry_when.get(group)
        return (
            retry is None or self._cache.num_available_blocks >= retry.num_blocks or self._occupancy != retry.occupancy
        )

    def _admit(self, group: SequenceGroup) -> bool:
        """Open the group's tables, and take it out of the queue; False: it does not fit beside the running groups."""
        if not self._open_beside_running(group):
            self.first_without_room = self.first_without_room or group
            return False
        self.forget(group)
        self._num_admitted += 1
        self._waiting.admit(group)
        self._in_flight_prefixes.add(group)
        self._current_usage().add(group)
        if self._loads is not None:
            self._loads.note_admitted(group)
        return True

    def _open_beside_running(self, group: SequenceGroup) -> bool:
        """Open the group's tables; False: it does not fit, and they are closed."""
        if group.num_seqs > self._num_admissible_seqs or not self._may_fit_now(group):
            return False
        available, request = self._cache.num_available_blocks, group.request
        try:
            if len(group.sequences) == 1:
                # Before it is opened: a group that does not fit would evict others' prefixes in vain, and use its own.
                demand = self._cache.demand(group.prefill_token_ids, request.namespace, read=request.reuses_prefixes)
                self._require_growth(group, demand.num_cached_tokens, demand.num_blocks)
                self._blocks.open(group)
            else:
                # How much the sequences share is known only once their tables are open.
                self._blocks.open(group)
                self._require_growth(group)
        except BaseException as error:
            self._growth = None  # the group may be counted in it
            self._blocks.undo_open(group)
            if not isinstance(error, OutOfBlocks):
                raise
            missing = error.needed - error.free - error.evictable
            self._retry_when[group] = _RetryWhen(available + missing, self._occupancy)
            return False
        return True

    def _num_spare_blocks(self) -> int:
        """Blocks that are available beyond what the running groups may need."""
        return self._cache.num_available_blocks - self._decode_growth().num_blocks

    def _require_growth(self, group: SequenceGroup, num_cached: int = 0, num_more_blocks: int = 0) -> None:
        """Raise OutOfBlocks unless the running groups and ``group``, counted among them now, can continue together.

        Args:
            group: the group about to run.
            num_cached: tokens that its one sequence will find cached, if that has no table yet.
            num_more_blocks: blocks that opening it will take.
        """
        growth = self._decode_growth()
        growth.add(group, num_cached)
        num_growth = growth.num_blocks if self._running else self._blocks.num_fork_blocks(group)
        self._cache.require(num_more_blocks + num_growth)
