"""Routing: to the replica that is expected to answer first and to delay other requests least.

The cost of sending a request to a replica is estimated as::

    seconds per token * (waiting + `decode_weight` * sequences that it decodes + weight * lacking)

    waiting   tokens that it was sent and has not computed yet
    lacking   tokens of this prompt that it does not hold
    weight    1.25 + log2(replicas) / 2 + waiting / mean tokens to compute of all queued requests

Waiting for a token costs only its time. Computing one costs that time; also room in a cache, where it displaces another
token that may have to be computed again, on each replica to which its prompts move; and the time of all requests that arrive
while the replica has a queue, which are about as many as are in it (Little 1961).

So a prompt goes where its prefix is, as long as waiting there costs less than computing the prefix elsewhere; where all have
to wait, it may wait longer. A prefix that many prompts share gets a second replica when the first has more to do than
computing the prefix again takes. A prompt of which no replica holds anything goes to the least loaded replica or, among idle
ones, to the one that was sent the fewest tokens lately.

What a replica holds is known from its cache's events (`radixkv.cache.events`). Those come late, so a request's blocks count
as held by its replica until its first token and for a while after that, by the end of which the events must have come.

Several routers over the same replicas know what the others have sent, because each replica reports which requests it has
received, computed and ended (`expect`, `expected_prefilled`, `expected_finished`). So they agree, except on what has happened
since. Counts that a replica reports now and then cannot replace that: one that crosses the end of a request counts it once
more, and the next prompt goes away from where it is held.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

from radixkv.cache import AllCleared, BlocksRemoved, BlocksStored, CacheEvent
from radixkv.cache.arguments import check_count, check_namespace, is_number
from radixkv.cache.block_hash import namespace_hash, next_hash, next_hashes
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, encode_prompt
from radixkv.routing.block_index import BlockIndex
from radixkv.routing.routed_replica import Placement, RoutedReplica

# The weight of a computed token where nothing waits, for its time and its room: the first number, plus the second for each
# doubling of the replicas, since among many one is more often idle, and prompts would move to it. With weights from
# 1.5 to 4.75, answers come about equally soon on synthetic traces and a public one; with less, fewer tokens are found cached,
# and with more, loads differ more.
_WEIGHT, _WEIGHT_OF_DOUBLING = 1.25, 0.5
# How long after a prompt's first token its blocks still count as held: by then, events have reported them.
_EXPECTED_SECONDS = 5.0
# Most blocks, and requests, tracked of those that other routers sent to one replica.
_MAX_OTHERS_BLOCKS = 1 << 20


def prompt_hashes(token_ids: TokenIds, namespace: str, block_size: int) -> list[int]:
    """Hashes of the whole blocks of a prompt, as they are in the events of a cache with this block size.

    Raises:
        InvalidArgumentError: there are no tokens, one is not a token id, or ``namespace`` is not a string.
    """
    check_namespace(namespace)
    encoded, block_bytes = encode_prompt(token_ids), block_size * TOKEN_BYTES
    whole = len(encoded) // block_bytes * block_bytes
    return next_hashes(namespace_hash(namespace), encoded[:whole], block_bytes)


class Router:
    """Chooses replicas, by what they report and what was sent to them.

    Args:
        block_size: tokens per block of every replica's cache.
        decode_weight: how much a decoding sequence counts, in prompt tokens.
        seconds_per_token: of prefill, until a replica has reported it.
        clock: seconds since any moment.

    Raises:
        ValueError: a number is not above 0.
    """

    def __init__(
        self,
        block_size: int,
        *,
        decode_weight: float = 128.0,
        seconds_per_token: float = 5e-4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_count("block_size", block_size, 1)
        for name, value in (("decode_weight", decode_weight), ("seconds_per_token", seconds_per_token)):
            if not (is_number(value) and value > 0):
                raise ValueError(f"{name}: expected a number above 0, got {value!r}")
        self.block_size = block_size
        self._held = BlockIndex()
        self._decode_weight = decode_weight
        self._seconds_per_token = seconds_per_token
        self._clock = clock
        self._replicas: dict[str, RoutedReplica] = {}
        # When a request's blocks cease to be expected, the request, and how many of its leading blocks that concerns.
        self._expiring: deque[tuple[float, Placement, int]] = deque()

    @property
    def replicas(self) -> list[str]:
        """The names of those that may be chosen."""
        return list(self._replicas)

    def add(self, name: str, *, caches: bool = True) -> None:
        """Let a replica be chosen from now on; nothing is known of it yet.

        Args:
            name: the replica's.
            caches: whether it keeps what it computes for other prompts.

        Raises:
            ValueError: there is one of this name.
        """
        if name in self._replicas:
            raise ValueError(f"name: a replica {name!r} is there already")
        used = {replica.number for replica in self._replicas.values()}
        number = next(number for number in range(len(used) + 1) if number not in used)
        self._replicas[name] = RoutedReplica(number, caches)

    def remove(self, name: str) -> None:
        """Stop choosing a replica, and forget what it holds; an unknown name is ignored."""
        replica = self._replicas.pop(name, None)
        if replica is not None:
            self._held.clear(replica.number)

    def update(self, name: str, event: CacheEvent) -> None:
        """Note a change of a replica's cache: see `stored`, `removed` and `cleared`."""
        match event:
            case BlocksStored():
                self.stored(name, event.block_hashes)
            case BlocksRemoved():
                self.removed(name, event.block_hashes)
            case AllCleared():
                self.cleared(name)

    def stored(self, name: str, block_hashes: Iterable[int]) -> None:
        """A replica holds these blocks; an unknown replica is ignored."""
        replica = self._replicas.get(name)
        if replica is not None:
            self._held.add(block_hashes, replica.number)

    def removed(self, name: str, block_hashes: Iterable[int]) -> None:
        """A replica no longer holds these blocks; an unknown replica is ignored."""
        replica = self._replicas.get(name)
        if replica is not None:
            self._held.discard(block_hashes, replica.number)

    def cleared(self, name: str) -> None:
        """A replica holds nothing any more; an unknown replica is ignored."""
        replica = self._replicas.get(name)
        if replica is not None:
            self._held.clear(replica.number)
            replica.clear()

    def report(self, name: str, seconds_per_token: float | None = None) -> None:
        """Note a replica's report of its speed; those of unknown replicas are ignored.

        Args:
            name: the replica's.
            seconds_per_token: of prefill, see `PrefillRate`; None: it has not measured it yet.

        Raises:
            ValueError: ``seconds_per_token`` is not above 0.
        """
        if seconds_per_token is not None and not seconds_per_token > 0:
            raise ValueError(f"seconds_per_token: expected a number above 0 or None, got {seconds_per_token!r}")
        self._expire_expected(self._clock())
        replica = self._replicas.get(name)
        if replica is not None and seconds_per_token != replica.seconds_per_token:
            replica.seconds_per_token = seconds_per_token
            known = [each.seconds_per_token for each in self._replicas.values() if each.seconds_per_token is not None]
            if known:  # replicas whose speed is unknown are taken to have the mean of the others'
                self._seconds_per_token = sum(known) / len(known)

    def expect(self, name: str, request: Hashable, block_hashes: Sequence[int], num_prompt_tokens: int) -> None:
        """Note that another router has sent a request to a replica: it counts like one sent from here.

        So routers agree on which replica will hold what, before any has computed it. `expected_finished` or `reset` must be
        called for it later. Requests that are known already are ignored, as are those to unknown replicas. Beyond a million
        blocks of one replica, only the lengths of prompts count; beyond a million requests, nothing.

        Args:
            name: the replica's.
            request: what the replica calls it.
            block_hashes: from `prompt_hashes`; empty for a request that does not read the cache, or does not write it.
            num_prompt_tokens: of the whole prompt.
        """
        replica = self._replicas.get(name)
        if replica is None or request in replica.others or len(replica.others) >= _MAX_OTHERS_BLOCKS:
            return
        if replica.num_others_blocks + len(block_hashes) > _MAX_OTHERS_BLOCKS:
            block_hashes = ()
        depth = replica.depth(block_hashes, self._held.hits(block_hashes))
        num_hit_tokens = min(depth * self.block_size, num_prompt_tokens - 1)
        placement = self._place(name, replica, block_hashes, num_prompt_tokens, num_hit_tokens, self._clock())
        replica.others[request] = placement
        replica.num_others_blocks += len(placement.block_hashes)

    def expected_prefilled(self, name: str, request: Hashable) -> None:
        """The prompt of another router's request is computed, see `prefilled`; one that is not expected is ignored.

        Args:
            name: the replica's.
            request: what the replica calls it.
        """
        replica = self._replicas.get(name)
        placement = None if replica is None else replica.others.get(request)
        if placement is not None:
            self.prefilled(placement)

    def expected_finished(self, name: str, request: Hashable) -> None:
        """Another router's request has ended, see `finish`; one that is not expected is ignored.

        Args:
            name: the replica's.
            request: what the replica calls it.
        """
        replica = self._replicas.get(name)
        placement = None if replica is None else replica.others.pop(request, None)
        if replica is not None and placement is not None:
            replica.num_others_blocks -= len(placement.block_hashes)
            self.finish(placement)

    def reset(self, name: str) -> None:
        """Forget what a replica holds and what others have sent to it, because it is about to report both anew."""
        replica = self._replicas.get(name)
        if replica is not None:
            for request in list(replica.others):
                self.expected_finished(name, request)
            self.cleared(name)

    def holder(self, block_hashes: Sequence[int]) -> str | None:
        """The replica that holds, or will hold, most of a prefix; None: no replica holds any of it.

        One that holds it goes before others that only will. Among several of these, the choice is always the same for one
        prefix and differs between prefixes, which spreads them: "rendezvous hashing" (Thaler and Ravishankar 1998).

        Args:
            block_hashes: from `prompt_hashes`.
        """
        held = self._held.hits(block_hashes)
        depths = {name: replica.depth(block_hashes, held) for name, replica in self._replicas.items()}
        depth = max(depths.values(), default=0)
        if depth == 0:
            return None
        last = block_hashes[depth - 1]
        holding = self._held.replicas(last)
        return max(
            (name for name in depths if depths[name] == depth),
            key=lambda name: (holding >> self._replicas[name].number & 1, next_hash(last, name.encode())),
        )

    def choose(
        self,
        block_hashes: Sequence[int],
        num_prompt_tokens: int,
        excluded: Collection[str] = (),
        *,
        writes: bool = True,
    ) -> Placement | None:
        """Choose where to send a request; `prefilled` and `finish` must be called for it later.

        Args:
            block_hashes: from `prompt_hashes`; empty for a request that does not read the cache.
            num_prompt_tokens: of the whole prompt.
            excluded: replicas not to choose.
            writes: whether the replica will hold these blocks because of this request.

        Returns:
            Where it goes; None: no replica may be chosen.
        """
        now = self._clock()
        hits: dict[int, int] = {}
        for mask, depth in self._held.hits(block_hashes):
            while mask:
                number = mask.bit_length() - 1
                mask ^= 1 << number
                hits[number] = depth
        num_queued = num_requests = 0
        for replica in self._replicas.values():
            num_queued += replica.queued
            num_requests += len(replica.waiting)
        requests_per_token = num_requests / max(1, num_queued)
        least_weight = _WEIGHT + _WEIGHT_OF_DOUBLING * math.log2(max(1, len(self._replicas)))
        block_size, num_blocks = self.block_size, len(block_hashes)
        lowest, chosen, chosen_name, chosen_hit = 0.0, None, "", 0
        for name, replica in self._replicas.items():  # few calls in it: it runs for each replica and each request
            if name in excluded:
                continue
            hit = hits.get(replica.number, 0)
            if hit < num_blocks and block_hashes[hit] in replica.expected:
                hit = replica.expected_depth(block_hashes, hit)
            hit *= block_size
            if hit >= num_prompt_tokens:
                hit = num_prompt_tokens - 1  # the last token is always computed
            rate = replica.seconds_per_token or self._seconds_per_token
            num_lacking = num_prompt_tokens - hit
            seconds = rate * (least_weight * num_lacking + self._decode_weight * len(replica.decoding))
            if replica.waiting:
                seconds += replica.seconds_left(now, rate) * (1 + requests_per_token * num_lacking)
            if (
                chosen is None
                or seconds < lowest
                or (seconds == lowest and replica.recently_sent(now) < chosen.recently_sent(now))
            ):
                lowest, chosen, chosen_name, chosen_hit = seconds, replica, name, hit
        if chosen is None:
            return None
        return self._place(chosen_name, chosen, block_hashes if writes else (), num_prompt_tokens, chosen_hit, now)

    def prefilled(self, placement: Placement) -> None:
        """The request's first token has come."""
        if placement.prefilled:
            return
        self._leave_queue(placement, computed=True)
        placement.state.decoding.add(placement)

    def finish(self, placement: Placement) -> None:
        """The request has ended, however that came about."""
        if not placement.prefilled:
            self._leave_queue(placement, computed=False)
        else:
            placement.state.decoding.discard(placement)

    def _place(
        self,
        name: str,
        replica: RoutedReplica,
        block_hashes: Sequence[int],
        num_prompt_tokens: int,
        num_hit_tokens: int,
        now: float,
    ) -> Placement:
        """Note a request sent to a replica that holds, or will hold, ``num_hit_tokens`` of its prompt.

        Args:
            block_hashes: of the blocks that it will hold then, if it caches.
        """
        num_lacking, first_expected = num_prompt_tokens - num_hit_tokens, num_hit_tokens // self.block_size
        placement = Placement(name, replica, block_hashes if replica.caches else (), num_lacking, first_expected)
        replica.enqueue(placement, now)
        return placement

    def _leave_queue(self, placement: Placement, *, computed: bool) -> None:
        placement.prefilled, now = True, self._clock()
        placement.state.dequeue(placement, now, computed=computed)
        self._expiring.append((now + _EXPECTED_SECONDS, placement, len(placement.block_hashes)))
        self._expire_expected(now)

    def _expire_expected(self, now: float) -> None:
        """Stop expecting blocks that events must have reported by now.

        That takes about as long as a choice does, so it is done between choices, for a few placements at a time.

        If a request ended before it was computed, requests that wait may still need its blocks: these stay expected for
        another period.
        """
        for _ in range(2):
            if not self._expiring or self._expiring[0][0] > now:
                return
            _, placement, end = self._expiring.popleft()
            replica, hashes, first = placement.state, placement.block_hashes, placement.first_expected
            awaited = first
            if first < end and not self._held.replicas(hashes[end - 1]) >> replica.number & 1:
                awaited = replica.awaited_depth(hashes, first, end)
                if awaited > first:
                    self._expiring.append((now + _EXPECTED_SECONDS, placement, awaited))
            replica.expected.difference_update(hashes[awaited:end])
