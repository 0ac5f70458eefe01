"""Streams of outputs in an event loop, given what an engine could deliver."""

from __future__ import annotations

import asyncio

import pytest

from radixkv import CompletionOutput, RequestOutput
from radixkv.outputs import RequestMetrics
from radixkv.serving.request_stream import RequestStream


def test_a_stream_that_was_failed_is_not_begun_again_by_what_a_step_had_under_way() -> None:
    """It no longer counted as ended, and its reader waited for more after the error."""
    under_way = RequestOutput(
        "name", None, [5], None, [CompletionOutput(0, "a", [6])], False, 0, RequestMetrics(arrival_time=0.0)
    )

    async def test() -> None:
        closed: list[RequestStream] = []
        stream = RequestStream("name", closed.append, RequestMetrics(0.0))
        stream.put(ValueError("too late"))
        stream.put(under_way)
        assert stream.ended
        with pytest.raises(ValueError, match="too late"):
            await anext(stream)
        assert closed == [stream]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(test())
