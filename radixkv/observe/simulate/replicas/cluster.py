"""Simulates several replicas, event by event in the order of time.

A replica computes one prompt after another, beside the sequences that decode; `CostModel` gives how long that takes. Its
cache is a `PrefixCache` with the trace's blocks as tokens. Shortly after a change it reports to all routers: changes of its
cache, requests that it received, computed or ended, and its speed.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from radixkv.cache import BlockTable, EventLog, OutOfBlocks, PrefixCache
from radixkv.cache.block_hash import namespace_hash, next_hashes
from radixkv.cache.tokens import TOKEN_BYTES, encode
from radixkv.observe.simulate.replicas.choosers import Chooser
from radixkv.observe.simulate.replicas.cost_model import CostModel
from radixkv.observe.simulate.trace import LAST_TOKEN, Trace, TracedRequest
from radixkv.routing import PrefillRate

# Delay until a change reaches the routers.
_SECONDS_TO_PUBLISH = 0.1


@dataclass(slots=True)
class Outcome:
    """The results of a run.

    Attributes:
        num_hit_blocks: blocks of all requests' prompts that were found cached.
        first_token_seconds: of each request, from its arrival.
        busy: of each replica, seconds of prefill in each window of time.
        longest: the most seconds of each window that a single prompt took.
    """

    num_hit_blocks: int = 0
    first_token_seconds: list[float] = field(default_factory=list)
    busy: list[dict[int, float]] = field(default_factory=list)
    longest: dict[int, float] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Replica:
    """One replica.

    Sequences that decode get a token in each step, all at once: one that has begun at `progress` p and generates n tokens
    ends when `progress` is p + n.

    Attributes:
        cache: another replica may share it.
        queue: requests that wait behind the prompt being computed.
        prompt_tokens: tokens to compute of the prompt being computed; 0: there is none.
        progress: steps that sequences could have taken part in, as of `progressed_at`.
        decoding: the progress at which each sequence ends, and its request: a heap.
        num_changes: how often the duration of a step has changed.
        rate: at which it has computed prompts.
    """

    number: int
    cache: PrefixCache
    queue: deque[int] = field(default_factory=deque)
    prompt_tokens: int = 0
    progress: float = 0.0
    progressed_at: float = 0.0
    decoding: list[tuple[float, int]] = field(default_factory=list)
    num_changes: int = 0
    rate: PrefillRate = field(default_factory=PrefillRate)


class Cluster:
    """Runs a trace once.

    Args:
        trace: the requests.
        num_replicas: that share the requests.
        num_blocks: of each replica's cache.
        cost: how long things take.
        one_cache: let all replicas share one cache with all their blocks: the bound.
        stretch: the factor by which the trace's time is stretched.
        window: seconds over which imbalance is measured.
    """

    def __init__(
        self,
        trace: Trace,
        num_replicas: int,
        num_blocks: int,
        cost: CostModel,
        *,
        one_cache: bool = False,
        stretch: float = 1.0,
        window: float = 10.0,
    ) -> None:
        self.now = 0.0
        self._trace, self._cost, self._stretch = trace, cost, stretch
        self._window = window
        if one_cache:
            caches = [self._make_cache(num_replicas * num_blocks)] * num_replicas
        else:
            caches = [self._make_cache(num_blocks) for _ in range(num_replicas)]
        self._replicas = [_Replica(number, cache) for number, cache in enumerate(caches)]
        self._tables: dict[int, BlockTable] = {}
        self._pending: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.outcome = Outcome(first_token_seconds=[0.0] * len(trace.requests), busy=[{} for _ in range(num_replicas)])

    def run(self, chooser: Chooser) -> Outcome:
        """Run all requests of the trace to their end."""
        self._chooser = chooser
        seed, requests = namespace_hash(""), self._trace.requests
        for number, request in enumerate(requests):
            while self._pending and self._pending[0][0] <= request.time * self._stretch:
                self._run_next()
            self.now = request.time * self._stretch
            hashes = next_hashes(seed, encode(request.prompt), TOKEN_BYTES)
            chosen = chooser.choose(number, hashes, self._num_prompt_tokens(request))
            replica = self._replicas[chosen]
            replica.queue.append(number)
            self._announce(replica, number, hashes)
            self._start(replica)
        while self._pending:
            self._run_next()
        return self.outcome

    def _make_cache(self, num_blocks: int) -> PrefixCache:
        return PrefixCache(num_blocks, 1, clock=lambda: self.now, events=EventLog())

    def _run_next(self) -> None:
        self.now, _, call = heapq.heappop(self._pending)
        call()

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._pending, (self.now + seconds, next(self._order), call))

    def _num_prompt_tokens(self, request: TracedRequest) -> int:
        return len(request.prompt) * self._trace.block_size + 1

    def _start(self, replica: _Replica) -> None:
        """Begin the next prompt, if there is one and its blocks fit; one that never fits is computed, and not cached."""
        if replica.prompt_tokens or not replica.queue:
            return
        number = replica.queue[0]
        request = self._trace.requests[number]
        table = replica.cache.open(np.concatenate([request.prompt, LAST_TOKEN]))
        num_hits, num_blocks = table.num_cached_tokens, len(request.prompt) + len(request.output)
        try:
            replica.cache.reserve(table, num_blocks)
        except OutOfBlocks:
            replica.cache.abort(table)
            if num_blocks <= replica.cache.num_blocks:
                return  # until a sequence that holds some of them ends
        else:
            self._tables[number] = table
        replica.queue.popleft()
        self.outcome.num_hit_blocks += num_hits
        num_tokens = (len(request.prompt) - num_hits) * self._trace.block_size + 1
        seconds = self._cost.prefill_seconds(num_tokens, len(replica.decoding))
        self._change(replica, num_tokens)
        self._note_busy(replica, seconds)
        self._later(seconds, lambda: self._prefilled(replica, number, num_hits, seconds))

    def _prefilled(self, replica: _Replica, number: int, num_hits: int, seconds: float) -> None:
        replica.rate.observe_step(replica.prompt_tokens, replica.prompt_tokens + len(replica.decoding), seconds)
        request, table = self._trace.requests[number], self._tables.get(number)
        self.outcome.first_token_seconds[number] = self.now - request.time * self._stretch
        self._chooser.prefilled(number)
        if table is not None:
            replica.cache.append(table, request.prompt[num_hits:])
            self._publish_events(replica)
        self._later(_SECONDS_TO_PUBLISH, lambda: self._report_prefilled(replica, number))
        num_tokens = request.num_output_tokens or len(request.output) * self._trace.block_size
        self._change(replica, 0, begins=(num_tokens, number))
        self._start(replica)

    def _change(self, replica: _Replica, prompt_tokens: int, begins: tuple[int, int] | None = None) -> None:
        """Steps take longer or shorter from now on: a prompt is computed beside them, or a sequence begins or has ended."""
        self._advance(replica)
        replica.prompt_tokens = prompt_tokens
        if begins is not None:
            heapq.heappush(replica.decoding, (replica.progress + begins[0], begins[1]))
        replica.num_changes += 1
        if replica.decoding:
            left, changes = replica.decoding[0][0] - replica.progress, replica.num_changes
            self._later(left * self._step_seconds(replica), lambda: self._finish(replica, changes))

    def _advance(self, replica: _Replica) -> None:
        replica.progress += (self.now - replica.progressed_at) / self._step_seconds(replica)
        replica.progressed_at = self.now

    def _step_seconds(self, replica: _Replica) -> float:
        return self._cost.step_seconds(replica.prompt_tokens, len(replica.decoding))

    def _finish(self, replica: _Replica, num_changes: int) -> None:
        """End the sequence that ends first, unless its end was put off or brought forward meanwhile."""
        if num_changes != replica.num_changes:
            return
        self._advance(replica)
        _, number = heapq.heappop(replica.decoding)
        table = self._tables.pop(number, None)
        if table is not None:
            replica.cache.append(table, self._trace.requests[number].output)
            replica.cache.close(table)
            self._publish_events(replica)
        self._change(replica, replica.prompt_tokens)
        self._chooser.finish(number)
        self._later(_SECONDS_TO_PUBLISH, lambda: self._chooser.expected_finished(replica.number, number))
        for waiting in self._replicas:
            if waiting.cache is replica.cache:
                self._start(waiting)

    def _publish_events(self, replica: _Replica) -> None:
        assert replica.cache.events is not None
        events = replica.cache.events.take()

        def publish() -> None:
            for event in events:
                self._chooser.update(replica.number, event)

        if events:
            self._later(_SECONDS_TO_PUBLISH, publish)

    def _announce(self, replica: _Replica, number: int, hashes: Sequence[int]) -> None:
        num_tokens = self._num_prompt_tokens(self._trace.requests[number])
        self._later(_SECONDS_TO_PUBLISH, lambda: self._chooser.expect(replica.number, number, hashes, num_tokens))

    def _report_prefilled(self, replica: _Replica, number: int) -> None:
        self._chooser.expected_prefilled(replica.number, number)
        self._chooser.report(replica.number, replica.rate.seconds_per_token)

    def _note_busy(self, replica: _Replica, seconds: float) -> None:
        busy, longest = self.outcome.busy[replica.number], self.outcome.longest
        start, end = self.now, self.now + seconds
        while start < end:
            window = int(start / self._window)
            until = min(end, (window + 1) * self._window)
            busy[window] = busy.get(window, 0.0) + until - start
            longest[window] = max(longest.get(window, 0.0), until - start)
            start = until if until > start else end


def imbalance(busy: Sequence[dict[int, float]], num_windows: int) -> float:
    """How much busier than the average the busiest replica is: the ratio of the two in each window, averaged over windows."""
    windows = _windows(busy, num_windows).values()
    return fmean([max(seconds) * len(seconds) / sum(seconds) for seconds in windows] or [1.0])


def least_imbalance(busy: Sequence[dict[int, float]], longest: dict[int, float], num_windows: int) -> float:
    """The least imbalance that any division of each window's work leaves, because no prompt can be divided.

    Args:
        busy: of each replica, seconds in each window.
        longest: the most seconds of each window that a single prompt took.
        num_windows: how many windows count, from the first on.
    """
    windows = _windows(busy, num_windows).items()
    return fmean([max(1.0, longest[window] * len(seconds) / sum(seconds)) for window, seconds in windows] or [1.0])


def _windows(busy: Sequence[dict[int, float]], num_windows: int) -> dict[int, list[float]]:
    """The seconds of all replicas in each window in which there are any."""
    windows = sorted({window for replica in busy for window in replica if window < num_windows})
    return {window: [replica.get(window, 0.0) for replica in busy] for window in windows}
