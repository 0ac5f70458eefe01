"""The real scheduler over a real cache, without a model: tokens are made up, and every decision is verified from outside."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from radixkv.cache import PrefixCache
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.batch import ScheduledChunk
from radixkv.scheduling.request import Request, SequenceGroup, TokenSequence
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.tenant_share import TenantShare
from radixkv.scheduling.waiting_queue import WaitingQueue

_numbers = itertools.count()

STEMS = [[100 * stem + token for token in range(40)] for stem in range(3)]


class SchedulerDriver:
    """Steps as the engine takes them.

    Args:
        max_overtaken: what the scheduler promises; checked at every admission.
        clock: the cache's, in seconds.
        ahead: launch each step before the tokens of the one before are known, as with asynchronous scheduling.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 1000,
        block_size: int = 4,
        splits_blocks: bool = True,
        budget: int = 32,
        max_num_seqs: int = 8,
        window: int = 32,
        max_overtaken: int = 32,
        ahead: bool = False,
        shares: Mapping[str, TenantShare] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = PrefixCache(num_blocks, block_size, splits_blocks=splits_blocks, clock=clock)
        queue = WaitingQueue(self.cache, window, max_overtaken)
        self.scheduler = Scheduler(self.cache, budget, max_num_seqs, queue)
        self.scheduler.set_tenants(shares or {})
        self.budget = budget
        self.max_num_seqs = max_num_seqs
        self.max_overtaken = max_overtaken
        self.requests: list[Request] = []
        self.admitted: list[Request] = []  # in the order in which they first ran
        self.preempted: list[Request] = []
        self.num_computed_tokens = 0
        self.served: Counter[str] = Counter()  # by tenant: tokens computed for prompts once, and twice those generated
        self.recomputed: Counter[Request] = Counter()  # tokens that were computed before a preemption, too
        self._ahead = ahead
        self._in_flight: list[SequenceGroup] = []  # the groups that get a token from the step in flight
        self._ends_after: dict[Request, int] = {}
        # Kept apart from the scheduler's own figures, which they verify.
        self._overtaken: dict[SequenceGroup, int] = {}
        self._num_tokens_when_started: dict[SequenceGroup, int] = {}
        self._most_computed: Counter[TokenSequence] = Counter()
        self._num_wanted_blocks = 0  # if all requests ran at once, and shared nothing
        self._started_in_step: list[SequenceGroup] = []  # in this order, which chunks and ranks may differ from
        start = self.scheduler.start

        def noted(group: SequenceGroup) -> None:
            self._started_in_step.append(group)
            start(group)

        self.scheduler.start = noted  # type: ignore[method-assign]

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    @property
    def num_free_seqs(self) -> int:
        """How many more sequences may run at the same time."""
        return self.max_num_seqs - sum(group.num_seqs for group in self.scheduler.running)

    def add(
        self,
        prompt: Sequence[int],
        *,
        priority: int = 0,
        max_new: int = 4,
        n: int = 1,
        namespace: str = "",
        tenant: str = "",
        ends_after: int | None = None,
        prompt_logprobs: int | None = None,
        read_cache: bool = True,
        write_cache: bool = True,
    ) -> Request:
        """Queue a request whose answers end after ``ends_after`` tokens, which the scheduler does not know."""
        request = Request(
            f"{len(self.requests)}",
            None,
            np.array(prompt, dtype=np.int32),
            SamplingParams(n=n, max_tokens=max_new, prompt_logprobs=prompt_logprobs),
            seed=0,
            max_new_tokens=max_new,
            end_token_ids=frozenset(),
            namespace=namespace,
            read_cache=read_cache,
            write_cache=write_cache,
            priority=priority,
            tenant=tenant,
        )
        sequence = TokenSequence(request, 0, list(prompt))
        request.sequences = [sequence]
        self.requests.append(request)
        self._num_wanted_blocks += n * (1 + (len(prompt) + max_new) // self.cache.block_size)
        self._ends_after[request] = min(max_new, ends_after or max_new)
        self.scheduler.add(SequenceGroup(request, [sequence], request.prompt_token_ids))
        return request

    def add_several(self, count: int, length: int, **options: Any) -> list[Request]:
        """Queue requests whose prompts share nothing."""
        return [self.add(prompt(length), **options) for _ in range(count)]

    def abort(self, request: Request) -> None:
        for group in self.scheduler.groups_of(request):
            for sequence in group.sequences:
                self.scheduler.blocks.abort(sequence)
            self.scheduler.remove(group)
        assert not self.scheduler.groups_of(request)

    def step(self) -> list[ScheduledChunk]:
        scheduler = self.scheduler
        had_work = self.has_work
        previous, self._in_flight = self._in_flight, []
        num_preemptions = scheduler.num_preemptions
        plenty = 2 * self.cache.num_available_blocks >= self.cache.num_blocks
        running = {group: group.sequences[0].num_computed - group.num_computed_at_start for group in scheduler.running}
        started = {group: group.started for group in scheduler.waiting}
        decoding = [group for group in running if group.num_pending == 1]
        self._started_in_step.clear()
        chunks = scheduler.schedule()
        if previous and not chunks:  # the step in flight is processed first
            for group in running.keys() - scheduler.running:
                self._verify_preemption(group, running[group], plenty)
            self._process(previous)
            return []
        assert chunks or not had_work, "nothing runs, although groups wait"
        self.cache.drain_copies()
        self._verify_batch(chunks, decoding)
        preempted = [group for group in running if group not in scheduler.running]
        for group in preempted:
            self._verify_preemption(group, running[group], plenty)
            started[group] = True
        # Where blocks are lacking, a group for which others were preempted may still not fit, and they may pass it so often.
        if self._num_wanted_blocks <= self.cache.num_blocks:
            assert scheduler.num_preemptions - num_preemptions == len(preempted), "it went on in the same step"
            served = {group.request.tenant for group in started if group in scheduler.running}
            # It starts in a later step where this one has no token left.
            if preempted and sum(chunk.num_tokens for chunk in chunks) < self.budget:
                assert served - {group.request.tenant for group in preempted}, "preempted for nobody"
        for group in self._started_in_step:
            if group in started:
                self._verify_admission(group, started)
        launched = self._execute(chunks)
        self._process(previous)
        if self._ahead:
            self._in_flight = launched
        else:
            self._process(launched)
        return chunks

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def run(self, max_steps: int = 10_000) -> int:
        """Run to the end of all work; returns how many steps it took."""
        for step in range(max_steps):
            if not self.has_work:
                return step
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def _verify_batch(self, chunks: list[ScheduledChunk], decoding: list[SequenceGroup]) -> None:
        assert sum(chunk.num_tokens for chunk in chunks) <= self.budget
        planned = {chunk.group for chunk in chunks}
        ready = [group for group in decoding if group in self.scheduler.running]
        assert len(planned.intersection(ready)) == min(len(ready), self.budget), "a stream was held up"

    def _verify_admission(self, group: SequenceGroup, started: dict[SequenceGroup, bool]) -> None:
        """``started``: the groups that waited, and whether they had run before; the admitted one is removed."""

        def queue_key(group: SequenceGroup) -> tuple[int, bool, int, int]:
            return group.request.priority, not started[group], group.request.arrival, group.sequences[0].index

        if not started[group]:
            self.admitted.append(group.request)
            for other in started:
                if other.request.tenant == group.request.tenant and queue_key(other) < queue_key(group):
                    self._overtaken[other] = self._overtaken.get(other, 0) + 1
                    assert self._overtaken[other] <= self.max_overtaken, "overtaken too often"
        del started[group]
        self._overtaken.pop(group, None)
        self._num_tokens_when_started[group] = len(group.sequences[0].token_ids)

    def _verify_preemption(self, group: SequenceGroup, num_computed: int, plenty: bool) -> None:
        self.preempted.append(group.request)
        assert all(sequence.table is None for sequence in group.sequences)
        assert not any(sequence.num_placeholders for sequence in group.sequences), "preempted with a token in flight"
        # Samples that part from each other while nothing else runs may run out of blocks earlier.
        if all(len(request.sequences) == 1 and request.num_seqs == 1 for request in self.requests):
            generated = len(group.sequences[0].token_ids) - self._num_tokens_when_started[group]
            # Between tenants, what has computed nothing may be preempted, too, and prompts count like what is generated.
            if len({request.tenant for request in self.requests}) == 1:
                assert generated >= self.cache.block_size, "preempted too soon"
            else:
                assert num_computed == 0 or num_computed >= self.cache.block_size or plenty, "preempted too soon"

    def _execute(self, chunks: list[ScheduledChunk]) -> list[SequenceGroup]:
        """Note what the chunks compute; returns the groups that get a token from it, new samples among them."""
        ready = []
        for chunk in chunks:
            assert chunk.completes == (chunk.num_tokens == chunk.sequence.num_pending)
            start = chunk.sequence.num_computed
            self.recomputed[chunk.sequence.request] += max(
                0, min(chunk.num_tokens, self._most_computed[chunk.sequence] - start)
            )
            self._most_computed[chunk.sequence] = max(self._most_computed[chunk.sequence], start + chunk.num_tokens)
            self.scheduler.blocks.commit([chunk])
            self.num_computed_tokens += chunk.num_tokens
            self.served[chunk.group.request.tenant] += chunk.num_tokens + chunk.completes
            if chunk.completes:
                ready.append(chunk)
        groups = []
        for chunk in ready:
            request = chunk.group.request
            groups.append(chunk.group)
            if len(request.sequences) < request.num_seqs:
                for index, sequence in enumerate(
                    self.scheduler.blocks.fork(chunk.sequence, request.num_seqs - 1), start=1
                ):
                    sequence.index = index
                    request.sequences.append(sequence)
                    groups.append(SequenceGroup(request, [sequence], chunk.group.prefill_token_ids))
                    self.scheduler.start(groups[-1])
                    self._num_tokens_when_started[groups[-1]] = len(sequence.token_ids)
        for group in groups:
            group.sequences[0].append_placeholder()
        return groups

    def _process(self, groups: list[SequenceGroup]) -> None:
        """Append the tokens of a step, and remove the groups that have ended."""
        for group in groups:
            request, (sequence,) = group.request, group.sequences
            if sequence.table is None:
                continue  # it ended or was given up after the step was launched
            # Every sample of every request gets tokens of its own.
            sequence.fill_placeholder(1000 + 97 * request.arrival + 13 * sequence.index + sequence.num_known_tokens)
            self.scheduler.blocks.publish_at_block_boundary(sequence)
            if len(sequence.output_token_ids) == self._ends_after[request]:
                sequence.drop_placeholders()
                self.scheduler.blocks.close(sequence)
                self.scheduler.remove(group)


def prompt(length: int) -> list[int]:
    """A prompt that shares nothing with any other."""
    start = 100_000 + 1000 * next(_numbers)
    return list(range(start, start + length))


def steps_to_first_token(driver: SchedulerDriver, request: Request) -> int:
    """Take steps until a request has its first token."""
    for step in range(1, 1000):
        driver.step()
        if request.sequences[0].output_token_ids:
            return step
    raise AssertionError("it starves")


def tail(number: int, length: int) -> list[int]:
    """What a prompt has behind its stem."""
    return [10_000 + 50 * number + token for token in range(length)]


def numbers(requests: list[Request]) -> list[int]:
    return [request.arrival for request in requests]


def warm(driver: SchedulerDriver, prompt: list[int]) -> None:
    """Leave a prompt in the cache."""
    driver.add(prompt, max_new=1)
    driver.run()
    driver.requests.clear()
    driver.admitted.clear()
