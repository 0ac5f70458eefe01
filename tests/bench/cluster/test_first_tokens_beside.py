"""A request beside streams in progress: what is measured, and what runs beside it."""

from __future__ import annotations

import asyncio

import pytest

from radixkv.bench.cluster.first_tokens_beside import first_tokens_beside
from radixkv.bench.serving.client import Answer, Messages


class FakeClient:
    """Answers after as many turns of the event loop as there are tokens; first tokens come after 1.5 seconds by its word.

    Attributes:
        beside: how many other answers were in flight as each probe began.
        error: of all answers of 64 tokens.
    """

    def __init__(self) -> None:
        self.beside: list[int] = []
        self.error: str | None = None
        self._in_flight = 0

    async def answer(self, messages: Messages, max_tokens: int, due: float) -> Answer:
        if max_tokens == 2:
            self.beside.append(self._in_flight)
        self._in_flight += 1
        for _ in range(max_tokens):
            await asyncio.sleep(0)
        self._in_flight -= 1
        return Answer(due, arrivals=[due + 1.5], error=self.error if max_tokens == 64 else None)


def test_all_other_streams_flow_beside_each_probe() -> None:
    client = FakeClient()
    seconds = asyncio.run(first_tokens_beside(client, streams=5, probes=8, seed=1))
    assert seconds == pytest.approx([1.5] * 8)
    assert client.beside[1:] == [5] * 7  # the first one begins before the others


def test_a_stream_that_fails_ends_the_measurement() -> None:
    """As an error that the command line says in one line, without a traceback."""
    client = FakeClient()
    client.error = "HTTP 500"
    with pytest.raises(ValueError, match="HTTP 500"):
        asyncio.run(first_tokens_beside(client, streams=2, probes=100, seed=1))
