"""How long a request waits before a replica that lost or refused it gets it again."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from support.pretended_replicas import answering, client_of, line, streams_over, tokens
from support.time_limit import HANGING

from radixkv.cluster import ReplicaStreams
from radixkv.errors import ReplicasLostError


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that are made; none of them is waited for."""
    made, sleep = list[float](), asyncio.sleep

    async def noted(seconds: float, result: Any = None) -> Any:
        made.append(seconds)
        return await sleep(0, result)

    monkeypatch.setattr(asyncio, "sleep", noted)
    return made


def failing(num_failures: int, error: type[httpx.TransportError], *, wait_seconds: float = HANGING) -> ReplicaStreams:
    """A replica that is up, answers no request before this many have failed, and then each."""
    num_requests = 0

    async def handler(request: httpx.Request) -> httpx.Response:
        nonlocal num_requests
        if request.url.path == "/health":
            return httpx.Response(200)
        num_requests += 1
        if num_requests <= num_failures:
            raise error("planted")
        return await answering(line(7, "length"))(request)

    return streams_over({"a": client_of(handler)}, wait_seconds=wait_seconds)


def test_a_replica_that_lost_a_request_gets_it_again_after_a_pause(pauses: list[float]) -> None:
    assert asyncio.run(tokens(failing(2, httpx.ReadError))) == [7]
    assert pauses == [0.25, 0.25]


def test_a_replica_that_refuses_a_request_gets_it_again_after_ever_longer_pauses(pauses: list[float]) -> None:
    assert asyncio.run(tokens(failing(5, httpx.ConnectError))) == [7]
    assert pauses == [0.25, 0.5, 1.0, 2.0, 2.0]


def test_no_pause_is_longer_than_a_request_waits(pauses: list[float]) -> None:
    with pytest.raises(ReplicasLostError, match="there is no replica that takes it"):
        asyncio.run(tokens(failing(10**6, httpx.ConnectError, wait_seconds=0.125)))
    assert 0 < max(pauses) <= 0.125
