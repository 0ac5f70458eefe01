"""One request's output as it arrives in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from radixkv.outputs import BeamSearchOutput, RequestMetrics, RequestOutput
from radixkv.threads import call_in_loop

if TYPE_CHECKING:
    from radixkv.scheduling.request import Request
    from radixkv.serving.engine_thread import RequestUpdate

OutputDelta = RequestOutput | BeamSearchOutput


class RequestStream:
    """Iterate to get what is new; a reader that stops before the end must `close` it, which aborts the request.

    A reader slower than the engine gets larger deltas, not more of them, so that no queue grows.

    Args:
        request_id: the request's.
        on_close: called once, when the stream is closed or read to its end.
        times: of the request; whoever runs it keeps them up to date.

    Attributes:
        request: whose updates are put here, if it runs in this process; its engine's thread sets it before the first one.
        begun: set when the request has its first token, or has ended.
    """

    def __init__(self, request_id: str, on_close: Callable[[RequestStream], None], times: RequestMetrics) -> None:
        self.times = times
        self.request: Request | None = None
        self.request_id = request_id
        self.ended = False
        self.begun = asyncio.Event()
        self._computing = asyncio.Event()
        self._on_close: Callable[[RequestStream], None] | None = on_close
        self._delta: OutputDelta | None = None
        self._failure: Exception | None = None
        self._arrived = asyncio.Event()

    @property
    def closed(self) -> bool:
        """Whether nothing more can be read: it was closed, or read to its end."""
        return self._on_close is None

    @property
    def admitted(self) -> bool:
        """Whether its prompt has been computed, at least in part, as far as is known here."""
        return self.times.scheduled_time is not None

    async def wait_until_admitted(self) -> None:
        """Wait until it is `admitted`, or has ended. Only for a request that runs in this process."""
        assert self.request is not None
        self.request.on_admitted = partial(call_in_loop, asyncio.get_running_loop(), self._computing.set)
        if not self.admitted:  # asked afterwards, so that nothing is missed in between
            await self._computing.wait()

    def put(self, update: RequestUpdate) -> None:
        """Add what the engine delivered; after a failure nothing is added."""
        self._computing.set()
        self.begun.set()
        if update is None or self._failure is not None:
            return
        if isinstance(update, Exception):
            self._failure = update
        elif isinstance(update, RequestOutput) and isinstance(self._delta, RequestOutput):
            self._delta = _merge(self._delta, update)
        else:
            self._delta = update
        self.ended = not isinstance(update, RequestOutput) or update.finished
        self._arrived.set()

    def close(self) -> None:
        """Read no further; an unfinished request is aborted before the engine's next step."""
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close(self)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> OutputDelta:
        if self.closed:
            raise StopAsyncIteration
        await self._arrived.wait()
        self._arrived.clear()
        delta, self._delta = self._delta, None
        if self.ended:
            self.close()
        if self._failure is not None:
            raise self._failure
        assert delta is not None
        return delta


def _merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two successive deltas of one request as one."""
    outputs = {output.index: output for output in first.outputs}
    for output in second.outputs:
        if output.index in outputs:
            outputs[output.index].extend(output)
        else:
            outputs[output.index] = output
    return replace(second, outputs=list(outputs.values()))
