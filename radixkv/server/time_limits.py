"""How long a request may wait in the queue, wait for its first token, and take in all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from radixkv.errors import RequestTimeoutError
from radixkv.outputs import RequestMetrics
from radixkv.server.operation.metrics import RequestTimer, ServerMetrics
from radixkv.server.served_model import ServedModel
from radixkv.serving.request_stream import RequestStream

_StageName = Literal["queue", "first_token", "total"]


class _Stage(NamedTuple):
    limit: float  # seconds from the request's arrival
    in_words: str
    is_late: Callable[[RequestMetrics], bool]  # whether the stage is not reached when the limit ends
    name: _StageName


@dataclass(frozen=True)
class TimeLimits:
    """Seconds from a request's arrival; None: no limit.

    Attributes:
        queue: until all of its prompts are admitted.
        first_token: until each has its first token.
        total: until it is finished.
    """

    queue: float | None = None
    first_token: float | None = None
    total: float | None = None

    def at_most(self, total: float | None) -> TimeLimits:
        """These limits, with the total lowered to what a request itself allows."""
        return replace(self, total=min((limit for limit in (self.total, total) if limit is not None), default=None))

    @property
    def stages(self) -> list[_Stage]:
        """The limits that are set, the earliest first; of equal ones, that of the earlier stage."""
        stages: list[tuple[float | None, str, Callable[[RequestMetrics], bool], _StageName]] = [
            (self.queue, "waited in the queue for", lambda times: times.scheduled_time is None, "queue"),
            (self.first_token, "had no token within", lambda times: times.first_token_time is None, "first_token"),
            (self.total, "was not finished within", lambda times: True, "total"),
        ]
        given = [_Stage(limit, words, is_late, name) for limit, words, is_late, name in stages if limit is not None]
        return sorted(given, key=lambda stage: stage.limit)


class Deadlines:
    """Ends the prompts of one HTTP request when it takes too long: its blocks are released before the next step.

    Args:
        metrics: in which the request's prompts are counted.

    Attributes:
        arrival: of the request, by `time.monotonic`: when its body had come, before anything was done for it.
    """

    def __init__(self, llm: ServedModel, limits: TimeLimits, metrics: ServerMetrics) -> None:
        self._llm = llm
        self._stages = limits.stages
        self._metrics = metrics
        self.arrival = time.monotonic()
        self._watch: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def before_admission(self, num_prompts: int = 1) -> AsyncIterator[list[RequestTimer]]:
        """While inside, the request is tokenized and queued.

        Yields:
            A timer for each prompt; they count the prompts as aborted if this takes too long, or is cancelled.

        Raises:
            DrainingError, EngineDeadError: it may not come in now. It still comes in if draining begins later.
            RequestTimeoutError: it took longer than the first limit.
        """
        timers = [RequestTimer(self._metrics, self.arrival) for _ in range(num_prompts)]
        try:
            with self._llm.coming_in():
                async with self._within(self._stages):
                    yield timers
        except (RequestTimeoutError, asyncio.CancelledError):
            for timer in timers:
                timer.end()
            raise

    def within_first_token_limit(self) -> AbstractAsyncContextManager[None]:
        """For what is to be done after the first token, before it is sent to the client.

        Raises:
            RequestTimeoutError: it took longer than the limit for the first token, or for all.
        """
        return self._within([stage for stage in self._stages if stage.name != "queue"])

    def within_total_limit(self) -> AbstractAsyncContextManager[None]:
        """For what is to be done after the last token, before the request is finished.

        Raises:
            RequestTimeoutError: it took longer than the limit for all.
        """
        return self._within([stage for stage in self._stages if stage.name == "total"])

    def watch(self, streams: Sequence[RequestStream]) -> None:
        """Enforce the limits from now on, until `close`."""
        if self._stages:
            self._watch = asyncio.ensure_future(self._enforce(streams))

    def close(self) -> None:
        """The request has ended."""
        if self._watch is not None:
            self._watch.cancel()

    @asynccontextmanager
    async def _within(self, stages: Sequence[_Stage]) -> AsyncIterator[None]:
        first = stages[0] if stages else None
        try:
            async with asyncio.timeout(None if first is None else self._seconds_left(first)) as timeout:
                yield
        except TimeoutError as error:
            if first is None or not timeout.expired():
                raise
            raise _too_late(first) from error

    async def _enforce(self, streams: Sequence[RequestStream]) -> None:
        for stage in self._stages:
            await asyncio.sleep(self._seconds_left(stage))
            if any(stage.is_late(stream.times) for stream in streams if stream.times.finished_time is None):
                for stream in streams:
                    self._llm.fail(stream.request_id, _too_late(stage))
                return

    def _seconds_left(self, stage: _Stage) -> float:
        return max(0.0, self.arrival + stage.limit - time.monotonic())


def _too_late(stage: _Stage) -> RequestTimeoutError:
    message = f"the request {stage.in_words} {stage.limit:g} seconds, which is the limit"
    return RequestTimeoutError(message, in_queue=stage.name == "queue")
