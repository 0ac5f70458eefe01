"""Groups that wait for a prefix that is being loaded from a tier below the pool, while others compute.

::

    waiting group ── look-up ──> spans below ── faster than computing? ──> load into reserved blocks ──> published, admitted
                     (thread)                                              (thread)

A load has a block table of its own, so it is tied to no request: whatever becomes of the groups that wait, what was loaded
is published, and the rest of its blocks are free again. Several groups that want the same prefix wait for the same load. A
load that takes longer than it is worth is given up, and its groups compute. A preempted group that resumes is a waiting group
like any other: if its blocks were evicted, they are loaded back from below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.cache import PrefixCache
from radixkv.cache.tokens import TOKEN_BYTES
from radixkv.scheduling.active_loads import ActiveLoad, ActiveLoads
from radixkv.scheduling.load_claims import LoadClaims
from radixkv.scheduling.prefix_look_ups import PrefixLookUps
from radixkv.scheduling.request import SequenceGroup
from radixkv.scheduling.waiting_prefix import WaitingPrefix
from radixkv.tiers.moves.block_moves import BlockMoves
from radixkv.tiers.moves.load import Load, LookUp
from radixkv.tiers.moves.loader import BlockLoader
from radixkv.tiers.moves.rates import Rates
from radixkv.tiers.stack import Span

# The time that a load or a look-up may take while that of computing is unknown; once it is known, the time beyond twice it.
_MAX_SECONDS = 5.0
_SLACK_SECONDS = 0.05


class _Room(NamedTuple):
    """Where a load's blocks may come from; see `PrefixLoads.find_or_load`."""

    num_spare_blocks: Callable[[], int]
    would_preempt: bool


class PrefixLoads:
    """The loads of one engine; for its thread.

    Args:
        rates: updated with each load.
        media: the name of each tier.
        moves: the transfers of evicted blocks to the tiers.
    """

    def __init__(
        self,
        cache: PrefixCache,
        loader: BlockLoader,
        rates: Rates,
        media: list[str],
        clock: Callable[[], float],
        moves: BlockMoves,
    ) -> None:
        self._cache = cache
        self._loader = loader
        self._rates = rates
        self._media = media
        self._clock = clock
        self._moves = moves
        self._prefixes: dict[SequenceGroup, WaitingPrefix] = {}
        self._active = ActiveLoads(loader, rates, clock)
        self._stopped = False
        self._claims = LoadClaims()
        self._look_ups = PrefixLookUps(loader)
        self.num_loads = 0
        self.num_given_up = 0
        self.num_not_worth_it = 0

    @property
    def has_reserved(self) -> bool:
        """Whether loads have got their blocks and wait for `begin`."""
        return self._active.has_reserved

    @property
    def in_progress(self) -> bool:
        """Whether something is loaded, or a group waits for a look-up, and not for longer than it may."""
        # One that yields blocks to others does not count: if nothing runs or loads, those have the blocks, or never fit.
        now = self._clock()
        return bool(self._active) or any(
            prefix.is_looked_for and now <= prefix.gives_up_at for prefix in self._prefixes.values()
        )

    def expect(self, group: SequenceGroup) -> None:
        """Begin to look for a group's prefix, so that the answer is there when the group could be admitted."""
        request = group.request
        if self._stopped or not request.reuses_prefixes:
            return
        prefix = self._prefixes[group] = WaitingPrefix(group)
        self._look_up(prefix)

    def find_or_load(self, group: SequenceGroup, num_spare_blocks: Callable[[], int], would_preempt: bool) -> bool:
        """Take the group's look-up or load one step further.

        Args:
            num_spare_blocks: how many blocks a load may take without taking them from running groups.
            would_preempt: whether running groups would be preempted for this one, unless it waits: a load then needs blocks
                for itself only.

        Returns:
            Whether the group waits for it, and is not to be admitted yet.
        """
        prefix = self._prefixes.get(group)
        if prefix is None or prefix.computes:
            return False
        if prefix.active is not None:
            return self._wait_on(prefix)
        self._claims.renew(prefix.claim)
        if prefix.version == self._cache.version:
            return False
        if prefix.look_up is None:
            self._look_up(prefix)
        look_up = prefix.look_up
        if look_up is None:
            return False
        spans = self._look_ups.answer(look_up)
        if spans is None:
            return self._wait_on(prefix)
        return self._load_found(prefix, look_up, spans, _Room(num_spare_blocks, would_preempt))

    def yields(self, group: SequenceGroup) -> bool:
        """Whether the group, when it was looked at last, left blocks to others that wait for loads."""
        prefix = self._prefixes.get(group)
        return prefix is not None and prefix.claim.yields

    def is_loading(self, group: SequenceGroup) -> bool:
        """Whether the group has a load that has not ended, its own or another's; it may have waited too long for it."""
        prefix = self._prefixes.get(group)
        return prefix is not None and prefix.active is not None

    def may_wait_out_of_turn(self, group: SequenceGroup) -> bool:
        """Whether `over` returns a waiting group once its wait is over, so that no step has to look at it until then."""
        prefix = self._prefixes[group]
        # A claim beside a look-up is renewed by looking at the group.
        return prefix.active is not None or (prefix.is_looked_for and not self._claims.has(prefix.claim))

    def over(self, groups: Iterable[SequenceGroup]) -> list[SequenceGroup]:
        """Those of some groups that wait for no load and no look-up any more, or have waited too long."""
        now = self._clock()
        prefixes = ((group, self._prefixes.get(group)) for group in groups)
        return [group for group, prefix in prefixes if prefix is None or not prefix.waits or now > prefix.gives_up_at]

    def hold_up_others(self, group: SequenceGroup) -> None:
        """Others wait until the group is admitted: from now on, it leaves no blocks to them."""
        prefix = self._prefixes.get(group)
        if prefix is not None:
            prefix.claim.holds_up_others = True

    def forget(self, group: SequenceGroup) -> None:
        """The group is admitted, or gone. A load that no group waits for any more ends as soon as it can."""
        prefix = self._prefixes.pop(group, None)
        if prefix is None:
            return
        self._claims.end(prefix.claim)
        if prefix.look_up is not None:
            self._note_missing(group, prefix.look_up)
        if prefix.active is not None:
            prefix.active.waiting.pop(group, None)
            if not prefix.active.waiting and prefix.active.try_cancel():
                self._end(prefix.active)

    def note_admitted(self, group: SequenceGroup) -> None:
        """A group begins, perhaps with cached blocks."""
        table, size = group.sequences[0].table, self._cache.block_size
        if table is not None and table.num_cached_tokens >= size and not self._stopped:
            start, stop = table.num_cached_tokens // size * size, table.num_cached_tokens
            if stop == len(group.prefill_token_ids) - 1:  # its last token is computed even if it is cached, too
                stop = self._cache.match(group.prefill_token_ids, group.request.namespace)
            self._moves.note_reused(table, _encoded(group.prefill_token_ids[start:stop]))

    def send_look_ups(self) -> None:
        """Send the look-ups that had to wait until all evicted blocks were on their way down."""
        self._look_ups.send()

    def begin(self, fence: object) -> None:
        """Begin the loads whose blocks were reserved; nothing that was launched after ``fence`` uses these blocks."""
        self._active.begin(fence)

    def publish_done(self) -> None:
        """A step begins: publish what was loaded, and give up what takes too long; the groups that waited can be admitted."""
        self._claims.begin_step()
        now = self._clock()
        for active in self._active:
            if active.load.done.is_set():
                self._end(active)
            elif active.is_ending or not active.waiting:
                if active.try_cancel():
                    self._end(active)
            elif now > active.gives_up_at:
                self._give_up(active)

    def end_unwanted(self) -> None:
        """Between steps: end loads that no group waits for. Unlike a step, this waits for chunks that are being written."""
        for active in self._active:
            if not active.waiting:
                self._end(active)

    def wait_for_progress(self, timeout: float) -> None:
        """Return when a look-up or a load is done, or after ``timeout`` seconds."""
        if self._loader.progress.wait(timeout):
            self._loader.progress.clear()

    def stop(self) -> None:
        """End all loads, and begin no more."""
        self._stopped = True
        for active in self._active:
            self._end(active)
        self._prefixes.clear()

    # -- internals -----------------------------------------------------------------------------------------------

    def _look_up(self, prefix: WaitingPrefix) -> None:
        """Begin to look for what is not cached of a group's prompt."""
        if self._look_ups.hangs:
            self._end_waiting(prefix)
            return
        group, size = prefix.group, self._cache.block_size
        num_tokens = self._cache.match(group.prefill_token_ids, group.request.namespace)
        start, stop = num_tokens // size, len(group.prefill_token_ids) // size
        prefix.look_up = None
        # The last token of a prompt is always computed, for its logits.
        if start == stop or num_tokens >= len(group.prefill_token_ids) - 1:
            prefix.version = self._cache.version
        else:
            prefix.look_up = LookUp(group.request.namespace, _encoded(group.prefill_token_ids), start)
            prefix.gives_up_at = self._clock() + self._allowed_seconds((stop - start) * size)
            self._look_ups.add(prefix.look_up)
            if not self._moves.has_unsent:
                self._look_ups.send()

    def _wait_on(self, prefix: WaitingPrefix) -> bool:
        """Wait for the load, or else the look-up, while it has time left; False: it has none, and the group computes."""
        if self._clock() <= prefix.gives_up_at:
            return True
        if prefix.active is not None:
            # Others may still want the load; if none does, it ends as the next step begins.
            del prefix.active.waiting[prefix.group]
            prefix.active = None
        elif prefix.look_up is not None:
            self._look_ups.give_up(prefix.look_up)
        self._end_waiting(prefix)
        return False

    def _load_found(self, prefix: WaitingPrefix, look_up: LookUp, spans: list[Span], room: _Room) -> bool:
        """Wait for what a look-up has found, as far as it is not cached by now; False: there is nothing worth loading."""
        group = prefix.group
        num_tokens = self._cache.match(group.prefill_token_ids, group.request.namespace)
        num_cached = num_tokens // self._cache.block_size
        if num_cached < look_up.start:
            self._look_up(prefix)  # evicted since
            return True
        spans = [Span(span.tier, max(span.start, num_cached), span.stop) for span in spans if span.stop > num_cached]
        if not spans or not look_up.keys[spans[0].start].is_whole or num_tokens >= len(group.prefill_token_ids) - 1:
            if not look_up.spans and not look_up.start:  # neither here nor below
                self._end_waiting(prefix)
            prefix.version = self._cache.version
            return False
        return self._join_or_begin_load(prefix, look_up, spans, num_cached, room)

    def _note_missing(self, group: SequenceGroup, look_up: LookUp) -> None:
        """Record for the transfers which block tiers lacked, if that is where an admitted group begins to compute."""
        table, size = group.sequences[0].table, self._cache.block_size
        if table is None or look_up.spans is None:
            return
        first = look_up.first_missing(look_up.spans)
        block = group.prefill_token_ids[first * size : (first + 1) * size]
        if table.num_cached_tokens // size == first and len(block) == size:
            self._moves.note_missing(table, _encoded(block))

    def _allowed_seconds(self, num_tokens: int) -> float:
        computing = self._rates.compute_seconds(num_tokens)
        return _MAX_SECONDS if computing is None else _SLACK_SECONDS + 2 * computing

    def _join_or_begin_load(
        self, prefix: WaitingPrefix, look_up: LookUp, spans: list[Span], num_cached: int, room: _Room
    ) -> bool:
        """Wait for a running load, or begin one; False: there is none, and the group computes what it lacks."""
        shared = self._active.shared(look_up.namespace, look_up.tokens, num_cached) if prefix.may_load else None
        if shared is not None:
            active, num_common = shared
            prefix.active = active
            now, allowed = self._clock(), self._allowed_seconds((num_common - num_cached) * self._cache.block_size)
            prefix.gives_up_at = now + allowed
            self._claims.set(prefix.claim, self._num_blocks(prefix.group) - num_common, loading=True)
            active.waiting[prefix.group] = now
            return True
        if prefix.may_load and not self._active.reader_hangs():
            if self._rates.choose_loading(spans, self._num_tokens(look_up, spans), self._active.seconds_left):
                return self._begin_load(prefix, look_up, spans, room)
            self.num_not_worth_it += 1
        self._end_waiting(prefix)
        return False

    def _begin_load(self, prefix: WaitingPrefix, look_up: LookUp, spans: list[Span], room: _Room) -> bool:
        """Reserve blocks for a new load, or yield to others' claims; False: there are too few, and nothing is loaded."""
        cache, group, request = self._cache, prefix.group, prefix.group.request
        nothing_runs = cache.num_available_blocks == cache.num_blocks  # and nothing is loaded
        first, stop, size = spans[0].start, spans[-1].stop, cache.block_size
        # With what is cached, which the table locks, and what the group computes after the load: otherwise running groups
        # would be preempted for the load, or its blocks evicted before the group fits. Victims are preempted once the load is
        # done; none for a load that would leave their blocks to other groups.
        tokens = group.prefill_token_ids[: stop * size] if room.would_preempt else group.prefill_token_ids
        missing = cache.demand(tokens, request.namespace).num_blocks - room.num_spare_blocks()
        num_claimed = 0 if nothing_runs else self._claims.of_others(prefix.claim)
        if missing > 0 and not (room.would_preempt and num_claimed):
            return False
        if missing + num_claimed > 0:
            self._claims.leave_to_others(prefix.claim)
            return True
        # Only now, because opening a table counts as a use of what is cached.
        loaded = look_up.tokens_until(stop)
        table = cache.open_fill(
            np.frombuffer(loaded, dtype=np.int32), request.namespace, -request.priority, request.tenant
        )
        try:
            cache.reserve(table, stop * size)
        except BaseException:
            cache.abort(table)
            raise
        load = Load(look_up.keys, spans, first, table.block_ids[first:].copy())
        seconds = self._rates.load_seconds(spans) or 0.0
        now, allowed = self._clock(), self._allowed_seconds(self._num_tokens(look_up, spans))
        active = ActiveLoad(load, table, loaded, size, seconds, now + allowed, {group: now})
        self._active.add(active)
        prefix.active, prefix.gives_up_at = active, math.inf  # the load has a deadline of its own
        prefix.num_loads += 1
        self._claims.set(prefix.claim, self._num_blocks(group) - table.num_blocks, loading=True)
        self.num_loads += 1
        return True

    def _end_waiting(self, prefix: WaitingPrefix) -> None:
        """The group computes what it lacks."""
        prefix.computes = True
        self._claims.end(prefix.claim)

    def _num_tokens(self, look_up: LookUp, spans: list[Span]) -> int:
        """How many tokens the blocks of some spans hold."""
        num_bytes = len(look_up.tokens_until(spans[-1].stop))
        return num_bytes // TOKEN_BYTES - spans[0].start * self._cache.block_size

    def _num_blocks(self, group: SequenceGroup) -> int:
        return -(-len(group.prefill_token_ids) // self._cache.block_size)

    def _give_up(self, active: ActiveLoad) -> None:
        """End a load that takes longer than it is worth. The time spent in vain on its next blocks shows its tier's speed."""
        self.num_given_up += 1
        for group in active.waiting:
            self._end_waiting(self._prefixes[group])
        in_vain = active.load.in_vain(self._clock())
        if not active.try_cancel():
            return  # the blocks being written will show the tier's speed themselves
        self._end(active)
        if in_vain is not None:
            tier, seconds = in_vain
            self._rates.observe_load(tier, 0, seconds)

    def _end(self, active: ActiveLoad) -> None:
        """Publish what is loaded by now and give the rest of the blocks back; those that waited may go on."""
        load, cache = active.load, self._cache
        self._active.end(active)
        size = cache.block_size
        start, stop = load.first * size, (load.first + load.num_loaded) * size
        cache.append(active.table, np.frombuffer(active.tokens, dtype=np.int32)[start:stop])
        was_cleared = active.table.node is None
        num_available = cache.num_available_blocks
        cache.close(active.table)
        if load.num_loaded and not was_cleared:
            self._moves.note_loaded(active.table.namespace, active.tokens[: stop * TOKEN_BYTES], load.first)
        # Blocks that no other table holds are now evictable or free; the first group that waited claims them.
        num_freed = cache.num_available_blocks - num_available
        is_whole = load.num_loaded == len(load.block_ids)
        now = self._clock()
        for group, since in active.waiting.items():
            prefix = self._prefixes[group]
            prefix.end_load(is_whole)
            if not prefix.computes:
                self._claims.set(prefix.claim, prefix.claim.num_blocks + num_freed, loading=False)
                num_freed = 0
            if group.request.num_cached_tokens is None:
                active.note_loaded(group.request.metrics, _encoded(group.prefill_token_ids), self._media, now - since)


def _encoded(tokens: NDArray[np.integer]) -> bytes:
    return tokens.astype(np.int32, copy=False).tobytes()
