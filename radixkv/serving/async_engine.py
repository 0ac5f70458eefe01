"""`AsyncEngine`: an engine in a thread of its own, whose requests are streams of an asyncio program."""

from __future__ import annotations

import asyncio
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from radixkv.cache.arguments import check_seconds
from radixkv.engine.clearing import Cleared, NamespaceSelection
from radixkv.engine.engine import Engine
from radixkv.engine.stats import EngineStats, engine_stats
from radixkv.errors import EngineDeadError
from radixkv.model.loader import LoadedModel
from radixkv.outputs import RequestMetrics
from radixkv.process_bound import ProcessBound
from radixkv.prompts import Prompt
from radixkv.sampling_params import BeamSearchParams, SamplingParams
from radixkv.scheduling.request import Request
from radixkv.scheduling.tenant_share import TenantShare
from radixkv.serving.early_aborts import EarlyAborts
from radixkv.serving.engine_thread import EngineThread, StepResult, refuse_in_use, why_in_use
from radixkv.serving.request_intake import RequestIntake
from radixkv.serving.request_stream import RequestStream
from radixkv.threads import call_in_loop, run_outside_workers

_T = TypeVar("_T")

# Time for writing what is cached into tiers at the end of an `async with` block: as much as `LLM.shutdown` has by default.
_WRITE_SECONDS = 30.0


class AsyncEngine(ProcessBound):
    """One thread runs the engine, another one tokenizes, and the event loop, to which the object belongs, has the streams.

    Args:
        engine: must not be used elsewhere from then on.
        max_queue: as for `AsyncLLM`.
        max_seqs_per_request: as for `AsyncLLM`.
        tenants: as for `AsyncLLM`.

    Attributes:
        loaded: the model.
        stats: of the engine after its latest step, abort or `call`, or the latest pin that expired.
        on_step: called in the event loop whenever there are new ones; for metrics.

    Raises:
        RuntimeError: another object runs the engine, an `LLM` has unfinished requests in it, or another process made it.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_queue: int | None = None,
        max_seqs_per_request: int | None = None,
        tenants: Mapping[str, TenantShare] | None = None,
    ) -> None:
        refuse_in_use(engine)
        self.loaded: LoadedModel = engine.loaded
        self.stats: EngineStats = engine_stats(engine)
        self.on_step: Callable[[EngineStats], None] | None = None
        if max_seqs_per_request is None:
            max_seqs_per_request = engine.max_num_seqs
        self._intake = RequestIntake(engine, max_queue, max_seqs_per_request, tenants or {})
        engine.scheduler.set_tenants(self._intake.slots.tenants)
        self._engine = engine
        self._engine_thread = EngineThread(engine, _weakly(self._deliver))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_ended = False
        self._streams: dict[str, RequestStream] = {}
        self._early_aborts = EarlyAborts()
        self._abandonment = asyncio.Event()
        self._cut_short = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._died = asyncio.Event()
        end = partial(_end_dropped, self._engine_thread, self._intake)
        self._if_dropped = weakref.finalize(self, run_outside_workers, end)
        self._if_dropped.atexit = False

    # -- requests ------------------------------------------------------------------------------------------------

    def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort a request, or several, before the next step; their iterations end with ``finish_reason`` "abort".

        One whose prompt is being tokenized, or that is prepared otherwise, is aborted when the engine has it.

        Raises:
            TypeError: ``request_id`` is neither a string nor consists of strings.
        """
        given: Any = [request_id] if isinstance(request_id, str) else request_id
        ids = list(given) if isinstance(given, Iterable) else [given]
        if not all(isinstance(each_id, str) for each_id in ids):
            raise TypeError(f"request_id: expected a string, or several, got {request_id!r:.80}")
        for each_id in ids:
            if each_id in self._streams:
                self._engine_thread.abort(each_id)
            self._early_aborts.abort(each_id)

    def fail(self, request_id: str, error: Exception) -> None:
        """Abort a request before the next step; what was not read yet is dropped, and its iteration raises ``error``."""
        stream = self._streams.get(request_id)
        if stream is not None and not stream.ended:
            stream.put(error)
            self._engine_thread.abort(request_id)

    def coming_in(self) -> AbstractContextManager[None]:
        """Announces requests to `shutdown`, which waits for them: inside, this task has them tokenized and submits them.

        Raises:
            DrainingError, EngineDeadError: new requests are refused.
        """
        return self._intake.coming_in()

    async def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        accepted: bool = False,
        times: Sequence[RequestMetrics] | None = None,
    ) -> list[RequestStream]:
        """Add requests for all of the prompts or, raising what `generate` raises, for none.

        Args:
            prompts: tokenized.
            params: for all prompts.
            request_id: the request's id; several requests get the ids ``request_id-0``, ``request_id-1`` and so on.
            priority: among the tenant's own requests.
            tenant: on whose behalf.
            accepted: another engine had accepted them, so they are not refused if too many are unfinished here.
            times: of each, kept up to date from now on, whatever comes of this call; None: they arrive now.

        Returns:
            One stream per prompt. The caller must iterate each to its end or close it.
        """
        if not isinstance(params, SamplingParams | BeamSearchParams):
            raise TypeError(f"sampling_params: expected SamplingParams, got {type(params).__name__}")
        if not isinstance(request_id, str | None):
            raise TypeError(f"request_id: expected a string, got {request_id!r:.80}")
        self._engine.check_process()
        times = times or [RequestMetrics(time.monotonic()) for _ in prompts]
        prepared = await self._intake.prepare(prompts, params, priority, tenant, accepted=accepted)
        self._intake.refuse_if_full(len(prompts), tenant, accepted=accepted)
        self._start()
        ids = self._intake.request_ids(request_id, len(prompts), unfinished=self._streams)
        forget = partial(self._forget, tenant)
        streams = [RequestStream(each_id, forget, each) for each_id, each in zip(ids, times, strict=True)]

        def make_requests(engine: Engine) -> list[Request]:
            requests = [each.make(engine.request_factory, each_id) for each_id, each in zip(ids, prepared, strict=True)]
            for stream, request in zip(streams, requests, strict=True):
                request.metrics, stream.request = stream.times, request
            return requests

        self._intake.slots.take(tenant, len(streams))
        self._streams.update(zip(ids, streams, strict=True))
        self._idle.clear()
        try:
            added = self._engine_thread.add(make_requests)
            for each_id in self._early_aborts.among(ids):
                self._engine_thread.abort(each_id)
            await asyncio.wrap_future(added)
        except BaseException:
            # Possibly cancelled after the engine had added them: closing a stream aborts its request.
            for stream in streams:
                stream.close()
            raise
        return streams

    # -- the engine and the tokenizer ----------------------------------------------------------------------------

    async def call(self, function: Callable[[Engine], _T]) -> _T:
        """Run a function on the engine between two steps, and wait for its result.

        Raises:
            EngineDeadError: the engine has stopped.
            Exception: what the function raises.
        """
        self._start()

        def call_and_deliver_stats(engine: Engine) -> _T:
            try:
                return function(engine)
            finally:
                # Delivered as after a step, so that earlier statistics do not replace later ones.
                self._deliver(StepResult({}, engine_stats(engine)))

        return await asyncio.wrap_future(self._engine_thread.call(call_and_deliver_stats))

    async def keep(self, tenant: str, namespace: str, token_ids: Sequence[int], ttl: float) -> int:
        """Keep the cached part of a prefix from eviction, within what a tenant may have; see `TenantPins.keep`."""
        return await self.call(lambda engine: engine.tenant_pins.keep(tenant, namespace, token_ids, ttl))

    async def clear(self, selection: NamespaceSelection) -> Cleared:
        """Forget what is cached for the selected namespaces, as `Engine.clear` does."""
        return await self.call(lambda engine: engine.clear(selection))

    async def run_tokenizer(self, function: Callable[[LoadedModel], _T], *, tenant: str = "", num_slots: int = 1) -> _T:
        """Run a function that tokenizes in the tokenizer's thread, which works for all tenants in turns.

        Args:
            function: given the model.
            tenant: on whose behalf, and so in whose turn.
            num_slots: queue slots that are taken meanwhile; 0: the request that this is for has its slot already, or the
                server does this for itself.

        Raises:
            QueueFullError: too many requests are unfinished, or wait to be tokenized.
            DrainingError, EngineDeadError: the thread was stopped.
            RuntimeError: another process made the engine.
            Exception: what the function raises.
        """
        self._engine.check_process()
        return await self._intake.run_tokenizer(partial(function, self.loaded), tenant, num_slots)

    async def set_tenants(self, tenants: Mapping[str, TenantShare]) -> None:
        """Set what each tenant may have, from the next step on.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        await self.call(lambda engine: engine.scheduler.set_tenants(tenants))
        self._intake.slots.tenants = tenants

    # -- lifecycle -----------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._intake.draining

    @property
    def death(self) -> EngineDeadError | None:
        """Why the engine takes no further step; None while it is alive."""
        return self._intake.death

    @property
    def abandoned(self) -> bool:
        """Whether `abandon` was called."""
        return self._abandonment.is_set()

    @property
    def seconds_in_step(self) -> float:
        """How long the engine has been at its current step or call; 0 while it has nothing to do."""
        return self._engine_thread.seconds_in_step

    @property
    def num_unfinished(self) -> int:
        """Requests that were added, and whose stream is neither read to its end nor closed."""
        return len(self._streams)

    @property
    def num_slots_taken(self) -> int:
        """Requests that count towards ``max_queue``: unfinished ones, and those that are being tokenized or prepared."""
        return self._intake.slots.num_taken

    async def wait_for_death(self) -> EngineDeadError:
        """Returns when the engine has died, with the reason."""
        await self._died.wait()
        death = self._intake.death
        assert death is not None
        return death

    def start_draining(self) -> None:
        """From now on refuse new requests; unfinished ones go on. See `shutdown` for those that are still being prepared."""
        self._intake.draining = True

    def abandon(self, reason: str) -> None:
        """Give up an engine that is stuck: it is dead from now on, every request fails, and `shutdown` does not wait for it.

        Its thread cannot be ended, so the process should.
        """
        death = EngineDeadError(f"the engine is dead: {reason}")
        self._abandonment.set()
        self._engine_thread.refuse_calls(death)
        for stream in self._streams.values():
            stream.put(death)
        self._distribute(StepResult({}, self.stats, death))

    async def shutdown(self, grace_seconds: float = 0.0) -> bool:
        """Refuse new requests, give unfinished ones ``grace_seconds``, abort the rest, and stop the threads.

        A request is unfinished from when the engine has it: one whose prompt is being tokenized, or whose grammar is being
        compiled, is refused like a new one, unless it is `coming_in`.

        In what is left of that time, what is cached is written into the tiers below the pool. Leaving ``async with`` aborts
        what is unfinished at once, and then writes for up to 30 seconds.

        Returns:
            Whether all requests finished without being aborted.

        Raises:
            ValueError: ``grace_seconds`` is not a number of at least 0.
        """
        check_seconds("grace_seconds", grace_seconds)
        return await self._end(grace_seconds, time.monotonic() + grace_seconds)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._end(0.0, time.monotonic() + _WRITE_SECONDS)

    # -- internals -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._engine.check_process()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            if self._has_ended:
                raise EngineDeadError("the engine was stopped")
            refuse_in_use(self._engine)
            self._loop = loop  # set before the thread begins, which delivers to it
            self._engine_thread.start()
        elif self._loop is not loop:
            raise RuntimeError("an AsyncLLM belongs to the event loop that used it first")

    async def _end(self, grace_seconds: float, write_until: float) -> bool:
        """`shutdown` with a separate deadline, by `time.monotonic`, for writing what is cached."""
        self._engine.check_process()
        finished = await self._intake.finish(self._idle, grace_seconds)
        self._intake.shut_down()
        self._cut_short = self._cut_short or bool(self._streams) or not finished
        if self._loop is None and not (self._has_ended or self.abandoned or why_in_use(self._engine)):
            self._start()  # one that was never used holds its tiers, too
        if self._loop is not None and not self.abandoned:
            left = max(0.0, write_until - time.monotonic())
            ended: asyncio.Future[Any] = asyncio.wrap_future(self._engine_thread.stop(left))
            abandoned: asyncio.Future[Any] = asyncio.ensure_future(self._abandonment.wait())
            try:  # `asyncio.wait` does not cancel the thread's end, which must not be cancelled
                await asyncio.wait({ended, abandoned}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                abandoned.cancel()
                await asyncio.wait({abandoned})  # none of its tasks outlives a shutdown
        self._has_ended = True
        self._if_dropped.detach()
        return not self._cut_short

    def _deliver(self, result: StepResult) -> None:
        """Called by the engine's thread."""
        assert self._loop is not None
        call_in_loop(self._loop, partial(self._distribute, result))

    def _distribute(self, result: StepResult) -> None:
        self.stats = result.stats
        for request, update in result.updates.items():
            stream = self._streams.get(request.request_id)
            if stream is None or stream.request is not request:
                continue  # its stream was closed since, and its abort is queued; another request may have its id
            stream.put(update)
            if stream.ended and not isinstance(update, Exception | None) and update.metrics.finished_time is not None:
                seconds = update.metrics.finished_time - update.metrics.arrival_time
                self._intake.note_duration(seconds)
        if self.on_step is not None:
            self.on_step(result.stats)
        if result.death is not None:
            self._intake.death = result.death
            self._died.set()

    def _forget(self, tenant: str, stream: RequestStream) -> None:
        del self._streams[stream.request_id]
        self._intake.slots.give_back(tenant)
        if not stream.ended:
            self._engine_thread.abort(stream.request_id)
        if not self._streams:
            self._idle.set()


def _weakly(deliver: Callable[[StepResult], None]) -> Callable[[StepResult], None]:
    """A bound method that does not keep its object alive: the thread that calls it would otherwise do so for ever."""
    method = weakref.WeakMethod(deliver)

    def deliver_if_alive(result: StepResult) -> None:
        alive = method()
        if alive is not None:
            alive(result)

    return deliver_if_alive


def _end_dropped(engine_thread: EngineThread, intake: RequestIntake) -> None:
    """Stop the threads of an object that is no longer there."""
    intake.shut_down()
    if engine_thread.runs:
        engine_thread.stop(0.0)
        warnings.warn(
            "an AsyncLLM was dropped while its engine ran: await its shutdown, or use it in `async with`",
            ResourceWarning,
            stacklevel=1,
        )
