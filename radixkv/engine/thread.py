"""The one thread that owns an engine.

The engine is single-threaded. Whoever wants something of it hands this thread a function, which runs between two steps;
what a step brought goes back through one callback a step::

    any thread  --- call(function) --->  queue  --->  engine thread: functions, step, functions, step, ...
    any thread  <--- deliver(StepResult) ----------------------------------------'
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from radixkv.engine.engine import Engine
from radixkv.engine.request_output import beam_output, delta_output
from radixkv.engine.stats import EngineStats, engine_stats
from radixkv.errors import EngineDeadError, NoBlocksLeftError, StepFailedError, StructuredOutputError
from radixkv.outputs import BeamSearchOutput, RequestOutput
from radixkv.scheduling.request import Request

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# What is new of a request: a piece of its answer, all its beams, or why it failed.
News = RequestOutput | BeamSearchOutput | Exception


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step, or the functions before it, brought.

    Attributes:
        news: by request id, for requests that got tokens or ended.
        stats: of the engine afterwards.
        death: why the engine takes no further step; None while it lives.
    """

    news: Mapping[str, News]
    stats: EngineStats
    death: EngineDeadError | None = None


@dataclass(frozen=True, slots=True)
class _Call(Generic[_T]):
    function: Callable[[Engine], _T]
    future: Future[_T]

    def run(self, engine: Engine) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.function(engine)
        except BaseException as error:  # it is the caller's to handle
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def refuse(self, error: EngineDeadError) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


class EngineThread:
    """Runs an engine until it is stopped or dies.

    A step that crashes fails the requests that were in it. The cache is then verified: if its rules hold, the engine goes
    on; if they do not, or if it is not known whom the crash concerned, the engine is dead, and so is every request.

    Args:
        engine: from `start` on, only this thread may touch it.
        deliver: called on this thread after every step; it must neither block nor raise.
    """

    def __init__(self, engine: Engine, deliver: Callable[[StepResult], None]) -> None:
        self._engine = engine
        self._deliver = deliver
        self._calls: queue.SimpleQueue[_Call[Any] | _Abort | None] = queue.SimpleQueue()
        self._requests: dict[str, Request] = {}
        # Guards `_closed`, so that no call is queued behind the last one that is looked at.
        self._lock = threading.Lock()
        self._closed: EngineDeadError | None = None
        self._thread = threading.Thread(target=self._run, name="radixkv-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[[Engine], _T]) -> Future[_T]:
        """Run ``function`` on the engine before its next step; functions run in the order of the calls.

        Raises:
            EngineDeadError: the engine was stopped or has died; the future gets it when that happens later.
        """
        call = _Call(function, Future[_T]())
        with self._lock:
            if self._closed is not None:
                raise EngineDeadError(str(self._closed)) from self._closed
            self._calls.put(call)
        return call.future

    def add(self, make_requests: Callable[[Engine], list[Request]]) -> Future[None]:
        """Have requests made, then all of them taken in; their news is delivered from the next step on.

        The future raises what `Engine.make_request` and `Engine.add` raise; then none has been taken in.
        """

        def add(engine: Engine) -> None:
            requests = make_requests(engine)
            added: list[Request] = []
            try:
                for request in requests:
                    engine.add(request)
                    added.append(request)
            except Exception:
                for request in added:
                    engine.abort(request.request_id)
                raise
            self._requests.update((request.request_id, request) for request in added)

        return self.call(add)

    def abort(self, request_id: str) -> None:
        """Give a request up before the next step, if it is unfinished then; what it has so far is its last news."""
        with self._lock:
            if self._closed is None:
                self._calls.put(_Abort(request_id))

    def stop(self) -> None:
        """Stop after the step that is running; what is unfinished is aborted. Waits for the thread's end."""
        with self._lock:
            self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        engine = self._engine
        try:
            while self._run_calls(wait=not engine.has_unfinished_requests):
                if engine.has_unfinished_requests:
                    self._deliver(self._step())
        except Exception as error:
            death = EngineDeadError(f"the engine is dead: {error}")
            death.__cause__ = error
            _log.critical("%s", death, exc_info=error)
            self._close(death, dict.fromkeys(self._requests, death), death)
        else:
            unfinished = [request for request in self._requests.values() if engine.abort(request.request_id)]
            self._close(EngineDeadError("the engine was stopped"), self._news_of(unfinished), None)

    def _run_calls(self, wait: bool) -> bool:
        """Run the queued functions, waiting for a first one if there is nothing else to do; False: stop."""
        while True:
            try:
                call = self._calls.get(block=wait)
            except queue.Empty:
                return True
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
            self._deliver(StepResult(self._news_of([request]), engine_stats(self._engine)))

    def _step(self) -> StepResult:
        engine = self._engine
        try:
            touched = engine.step()
        except Exception as error:
            touched = [request for request in self._requests.values() if request.failure is not None]
            self._check_after_crash(error, bool(touched))
        for request in touched:
            if request.finished:
                self._requests.pop(request.request_id, None)
        return StepResult(self._news_of(touched), engine_stats(engine))

    def _check_after_crash(self, error: Exception, concerns_known_requests: bool) -> None:
        """Raise unless the engine can go on."""
        _log.error("a step crashed", exc_info=error)
        if not concerns_known_requests:
            raise error
        self._engine.cache.check()

    def _news_of(self, requests: list[Request]) -> dict[str, News]:
        news: dict[str, News] = {}
        for request in requests:
            if request.failure is not None:
                news[request.request_id] = _failure_of(request)
            elif request.beam_search is None:
                output = delta_output(request)
                if output.finished or any(part.token_ids for part in output.outputs):
                    news[request.request_id] = output
            elif request.finished:
                news[request.request_id] = beam_output(request, self._engine.loaded)
        return news

    def _close(self, reason: EngineDeadError, news: Mapping[str, News], death: EngineDeadError | None) -> None:
        """Take no more calls, and leave nobody waiting: not for a call, and not for an answer."""
        with self._lock:
            self._closed = reason
        while not self._calls.empty():
            call = self._calls.get()
            if isinstance(call, _Call):
                call.refuse(reason)
        self._requests.clear()
        self._deliver(StepResult(news, engine_stats(self._engine), death))


def _failure_of(request: Request) -> Exception:
    cause = request.failure
    if isinstance(cause, NoBlocksLeftError | StructuredOutputError):
        return cause
    failure = StepFailedError(f"the step that request {request.request_id!r} was in crashed: {cause!r}")
    failure.__cause__ = cause
    return failure
