"""The requests that an engine has accepted and not yet ended, and the ways in which they end."""

from __future__ import annotations

import time
from collections.abc import Iterable

from radixkv.cache import PrefixCache
from radixkv.cache.counted import counted
from radixkv.engine.clearing import NamespaceSelection
from radixkv.engine.trace_recorder import TraceRecorder
from radixkv.errors import NoBlocksLeftError
from radixkv.scheduling.request import Request, SequenceGroup, TokenSequence
from radixkv.scheduling.scheduler import Scheduler


class UnfinishedRequests:
    """Unfinished requests by their ids; a recorder gets those that finish."""

    def __init__(self, cache: PrefixCache, scheduler: Scheduler, recorder: TraceRecorder | None) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._recorder = recorder
        self._by_id: dict[str, Request] = {}
        self._ended_elsewhere: list[Request] = []  # resumed with nothing left to generate; the next step ends them

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, request_id: str) -> Request | None:
        """The request with this id, if there is one."""
        return self._by_id.get(request_id)

    def check_ids(self, requests: Iterable[Request]) -> None:
        """Raise unless all of the requests can be added.

        Raises:
            ValueError: an unfinished request, or another one of these, has the id of one of them.
        """
        new: set[str] = set()
        for request in requests:
            if request.request_id in self._by_id or request.request_id in new:
                raise ValueError(f"request_id {request.request_id!r} belongs to an unfinished request")
            new.add(request.request_id)

    def add(self, request: Request, groups: list[SequenceGroup]) -> None:
        """Accept a request after `check_ids`, and schedule its groups; without any, `finish_ended_elsewhere` ends it."""
        self._by_id[request.request_id] = request
        if groups:
            self._scheduler.add(*groups)
        else:
            self._ended_elsewhere.append(request)

    def finish_ended_elsewhere(self) -> list[Request]:
        """End the requests that have nothing left to generate; returns them."""
        requests = [request for request in self._ended_elsewhere if not request.finished]
        self._ended_elsewhere.clear()
        for request in requests:
            self.finish(request)
        return requests

    def note_cleared(self, selection: NamespaceSelection) -> None:
        """What is cached for the selected namespaces was cleared: requests that have begun publish nothing more.

        Their block tables do so already, but a request that is preempted gets a new one when it resumes. What
        drafters have noted for these requests is dropped: it may have been cached.
        """
        for request in self._by_id.values():
            if request.namespace in selection and request.num_cached_tokens is not None:
                request.write_cache = False
                for sequence in request.sequences:
                    sequence.drafts = None

    def finish(self, request: Request) -> None:
        """End a request whose sequences have all ended."""
        request.metrics.finished_time = time.monotonic()
        del self._by_id[request.request_id]
        if self._recorder is not None:
            self._recorder.record(
                request.namespace,
                request.prompt_token_ids,
                _first_answer(request),
                request.metrics.arrival_time,
                request.priority,
            )

    def abort(self, request: Request) -> None:
        """End a request early."""
        if request.beam_search is None:  # before the first token, one sequence stands for all samples
            missing = range(len(request.sequences), request.num_seqs)
            request.sequences += [TokenSequence(request, index, request.prompt_token_list) for index in missing]
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = "abort"
        self.discard(request)

    def fail(self, requests: Iterable[Request], error: Exception) -> int:
        """Fail those of ``requests`` that are unfinished; returns how many these were."""
        unfinished = [request for request in dict.fromkeys(requests) if not request.finished]
        for request in unfinished:
            request.failure = error
            self.discard(request)
        return len(unfinished)

    def fail_first_without_room(self) -> list[Request]:
        """Fail the request that does not fit although nothing runs: blocks are pinned, and eviction cannot free them."""
        group = self._scheduler.admission.first_without_room
        if group is None:
            return []
        request = group.request
        num_needed = self._scheduler.admission.num_blocks_awaited(group)
        num_blocks, num_available = self._cache.num_blocks, self._cache.num_available_blocks
        request.failure = NoBlocksLeftError(
            f"request {request.request_id!r} needs {counted(num_needed, 'block')} besides what is cached of it, and only "
            f"{num_available} of {num_blocks} can be had, because {num_blocks - num_available} are pinned: "
            "unpin prefixes, ask for less, or raise kv_cache_memory_bytes or num_blocks"
        )
        self.discard(request)
        return [request]

    def discard(self, request: Request) -> None:
        """Remove an unfinished request, keeping no more of it cached than was already published."""
        for group in self._scheduler.groups_of(request):
            for sequence in group.sequences:
                self._scheduler.blocks.abort(sequence)
            self._scheduler.remove(group)
        request.metrics.finished_time = time.monotonic()
        del self._by_id[request.request_id]


def _first_answer(request: Request) -> list[int]:
    """The tokens of the first of an ended request's answers, or of its search's best beam; empty if that found none."""
    if request.beam_search is None:
        return request.sequences[0].output_token_ids
    return next((beam.token_ids for beam in request.beam_search.results()), [])
