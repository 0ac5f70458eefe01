"""The one thread that owns an engine.

The engine is single-threaded. Other threads hand this one functions, which run between two steps; the results of a step are
delivered through one callback per step::

    any thread  --- call(function) --->  queue  --->  engine thread: functions, step, functions, step, ...
    any thread  <--- deliver(StepResult) ----------------------------------------'
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from radixkv.engine.engine import Engine
from radixkv.engine.request_output import beam_output, delta_output
from radixkv.engine.stats import EngineStats, engine_stats
from radixkv.errors import EngineDeadError, NoBlocksLeftError, StepFailedError, StructuredOutputError
from radixkv.outputs import BeamSearchOutput, RequestOutput
from radixkv.scheduling.request import Request
from radixkv.threads import carry_out

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# What a step brought for a request: new output, all its beams, why it failed, or None: tokens of a search that goes on, whose
# beams may still be dropped.
RequestUpdate = RequestOutput | BeamSearchOutput | Exception | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step and of the functions that ran before it.

    Attributes:
        updates: of the requests that got tokens or ended. Keyed by the request, not by its id, which another request may get
            as soon as this one is no longer read.
        stats: of the engine afterwards.
        death: why the engine runs no further step; None while it does.
    """

    updates: Mapping[Request, RequestUpdate]
    stats: EngineStats
    death: EngineDeadError | None = None


@dataclass(frozen=True, slots=True)
class _Call(Generic[_T]):
    function: Callable[[Engine], _T]
    future: Future[_T]

    def run(self, engine: Engine) -> None:
        carry_out(self.future, partial(self.function, engine))

    def refuse(self, error: EngineDeadError) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


def why_in_use(engine: Engine) -> str | None:
    """Why no other thread may begin to run an engine; None: one may."""
    if engine.thread is not None:
        return "the engine is already in service: one AsyncLLM at a time may run an LLM"
    if engine.has_unfinished_requests:
        return "the LLM has unfinished requests: read its streams to their end, or close them, before it is given away"
    return None


def refuse_in_use(engine: Engine) -> None:
    """Raise unless a thread may begin to run an engine.

    Raises:
        RuntimeError: another thread runs it, an `LLM` has unfinished requests in it, or another process made it.
    """
    engine.check_process()
    reason = why_in_use(engine)
    if reason is not None:
        raise RuntimeError(reason)


class EngineThread:
    """Runs an engine until it is stopped or dies.

    A step that crashes fails the requests that were in it, and the engine continues. If the step raises (see `Engine.step`),
    the engine is dead, and every request fails.

    Args:
        engine: from `start` on, only this thread may touch it; `refuse_in_use` comes before.
        deliver: called on this thread after every step; it must neither block nor raise.
        clock: seconds, monotonic, for `seconds_in_step`.
    """

    def __init__(
        self, engine: Engine, deliver: Callable[[StepResult], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._clock = clock
        self._began: float | None = None  # the step or call; written by this thread, and read by any
        self._calls: queue.SimpleQueue[_Call[Any] | _Abort | None] = queue.SimpleQueue()
        self._requests: dict[str, Request] = {}
        # Guards `_closed`, so that no call is queued after the queue was drained for the last time.
        self._lock = threading.Lock()
        self._closed: EngineDeadError | None = None
        self._write_until = math.inf
        self._ended = Future[None]()
        self._thread = threading.Thread(target=self._run, name="radixkv-engine", daemon=True)

    @property
    def runs(self) -> bool:
        """Whether it was started and has not ended."""
        return self._thread.is_alive()

    @property
    def seconds_in_step(self) -> float:
        """How long the engine has been at its current step or call; 0 while it has nothing to do."""
        began = self._began
        return 0.0 if began is None else self._clock() - began

    def start(self) -> None:
        """Begin to run the engine."""
        self._engine.thread = self._thread
        self._thread.start()

    def call(self, function: Callable[[Engine], _T]) -> Future[_T]:
        """Run ``function`` on the engine before its next step; functions run in the order of the calls.

        Raises:
            EngineDeadError: the engine was stopped or has died; if that happens later, the future raises it.
        """
        call = _Call(function, Future[_T]())
        with self._lock:
            if self._closed is not None:
                raise EngineDeadError(str(self._closed)) from self._closed
            self._calls.put(call)
        return call.future

    def add(self, make_requests: Callable[[Engine], list[Request]]) -> Future[None]:
        """Make requests and queue them all; their updates are delivered from the next step on.

        The future raises what `RequestFactory.make` and `Engine.add` raise; then none is queued.
        """

        def add(engine: Engine) -> None:
            requests = make_requests(engine)
            engine.add(*requests)
            self._requests.update((request.request_id, request) for request in requests)

        return self.call(add)

    def abort(self, request_id: str) -> None:
        """Abort a request before the next step, if it is unfinished then; what it has generated so far is its last update."""
        with self._lock:
            if self._closed is None:
                self._calls.put(_Abort(request_id))

    def stop(self, grace_seconds: float) -> Future[None]:
        """Stop after the current step, and abort unfinished requests.

        Args:
            grace_seconds: for what is cached to be written into tiers below the pool; the shortest of several calls counts.

        Returns:
            A future that is done when the thread has ended, so that no other thread need wait. Must not be cancelled.
        """
        with self._lock:
            self._write_until = min(self._write_until, time.monotonic() + grace_seconds)
            self._calls.put(None)
        return self._ended

    def _run(self) -> None:
        engine = self._engine
        try:
            while self._run_calls(wait=not (engine.has_unfinished_requests or engine.write_behind())):
                if engine.has_unfinished_requests:
                    self._began = self._clock()
                    self._deliver(self._step())
            unfinished = [request for request in self._requests.values() if engine.abort(request.request_id)]
            reason, updates, death = EngineDeadError("the engine was stopped"), self._updates_of(unfinished), None
            self._began = None  # what follows is no step, and has a time limit of its own
            engine.shutdown(lambda: self._write_until - time.monotonic())
        except BaseException as error:
            death = EngineDeadError(f"the engine is dead: {str(error) or repr(error)}")
            death.__cause__ = error
            _log.critical("%s", death, exc_info=error)
            reason, updates = death, dict.fromkeys(self._requests.values(), death)
        self._began = None
        try:
            self.refuse_calls(reason)
            self._requests.clear()
            self._deliver(StepResult(updates, engine_stats(engine), death))
            if death is not None:
                engine.close()
        finally:
            engine.thread = None
            self._ended.set_result(None)  # whatever happens: whoever stops the thread waits for this

    def _run_calls(self, wait: bool) -> bool:
        """Run the queued functions; with ``wait``, block until there is one, or a pin expires. False: stop."""
        while True:
            if wait:
                self._began = None
            try:
                # Python accepts no longer timeout.
                timeout = min(self._engine.cache.seconds_until_pins_expire, threading.TIMEOUT_MAX)
                call = self._calls.get(wait, timeout)
            except queue.Empty:
                if wait:
                    self._deliver(StepResult({}, engine_stats(self._engine)))
                return True
            self._began = self._clock()
            if call is None:
                return False
            if isinstance(call, _Abort):
                self._abort(call.request_id)
            else:
                call.run(self._engine)
            wait = False

    def _abort(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None and self._engine.abort(request_id):
            # Only here: a request that is unfinished when the engine stops may go on elsewhere, with the text it withholds.
            for sequence in request.sequences:
                if sequence.detokenizer is not None:
                    sequence.detokenizer.finish()
            self._deliver(StepResult(self._updates_of([request]), engine_stats(self._engine)))

    def _step(self) -> StepResult:
        engine = self._engine
        touched = engine.step()
        crash = next((request.failure for request in touched if _has_crashed(request)), None)
        if crash is not None:
            _log.error("a step crashed", exc_info=crash)
        for request in touched:
            if request.finished:
                self._requests.pop(request.request_id, None)
        return StepResult(self._updates_of(touched), engine_stats(engine))

    def _updates_of(self, requests: list[Request]) -> dict[Request, RequestUpdate]:
        updates: dict[Request, RequestUpdate] = {}
        for request in requests:
            if request.failure is not None:
                updates[request] = _failure_of(request)
            elif request.beam_search is None:
                output = delta_output(request)
                if output.has_news:
                    updates[request] = output
            elif request.finished:
                updates[request] = beam_output(request, self._engine.decode_token)
            else:
                updates[request] = None
        return updates

    def refuse_calls(self, reason: EngineDeadError) -> None:
        """Refuse the queued calls and all later ones; it does not wait for the thread, which may be stuck."""
        with self._lock:
            self._closed = reason
        with suppress(queue.Empty):
            while True:
                call = self._calls.get(block=False)
                if isinstance(call, _Call):
                    call.refuse(reason)


def _has_crashed(request: Request) -> bool:
    """Whether it failed with its batch, rather than for reasons of its own."""
    return request.failure is not None and not isinstance(request.failure, NoBlocksLeftError | StructuredOutputError)


def _failure_of(request: Request) -> Exception:
    cause = request.failure
    assert cause is not None
    if not _has_crashed(request):
        return cause
    failure = StepFailedError(f"the step that request {request.request_id!r} was in crashed: {cause!r}")
    failure.__cause__ = cause
    return failure
