"""What all connections together may take: file descriptors, and memory for answers that are not read."""

from __future__ import annotations

import resource

import pytest
from support.client_connections import HEAD, Connection

from radixkv.server.transport.open_connections import OpenConnections, possible_connections


async def test_of_too_many_connections_those_without_a_request_are_closed() -> None:
    """A few thousand that sent nothing used to take all of the process's file descriptors, and no other could connect."""
    everyone = OpenConnections(max_connections=3)
    working, waiting, silent = (Connection(everyone) for _ in range(3))
    await working.send(HEAD + b"123456789")
    await waiting.send(HEAD + b"123456789")
    waiting.may_answer.set()
    await waiting.settle()
    fourth = Connection(everyone)
    assert [each.transport.aborted for each in (working, waiting, silent)] == [False, False, True]
    silent.protocol.connection_lost(None)
    fifth = Connection(everyone)
    assert [each.transport.aborted for each in (working, waiting, fourth)] == [False, True, False]
    waiting.protocol.connection_lost(None)
    await fourth.send(HEAD + b"123456789")
    await fifth.send(HEAD + b"123456789")
    assert Connection(everyone).transport.aborted
    assert not any(each.transport.aborted for each in (working, fourth, fifth))


async def test_of_many_connections_at_once_as_many_are_closed() -> None:
    """All those accepted in one turn of the event loop used to close the same one, and the others stayed."""
    everyone = OpenConnections(max_connections=3)
    burst = [Connection(everyone) for _ in range(7)]
    assert [each.transport.aborted for each in burst] == [True] * 4 + [False] * 3
    burst[6].protocol.connection_lost(None)  # before those that are being closed
    assert not Connection(everyone).transport.aborted
    assert not burst[4].transport.aborted
    for each in burst[:4]:
        each.protocol.connection_lost(None)
    assert Connection(everyone).transport.aborted is False
    assert [each.transport.aborted for each in burst[4:]] == [True, False, False]


async def test_of_too_much_that_is_not_read_the_oldest_is_dropped() -> None:
    """Unread answers used to fill the memory: the size of each was bounded, but not their number."""
    everyone = OpenConnections(max_unsent_bytes=100)
    clients = [Connection(everyone) for _ in range(4)]
    for client in clients:
        client.transport.unsent = 40
    for client in clients[:2]:
        client.protocol.pause_writing()
    clients[0].protocol.resume_writing()
    for client in clients[2:]:
        client.protocol.pause_writing()
    assert [client.transport.aborted for client in clients] == [False, True, False, False]
    clients[1].protocol.connection_lost(None)
    clients[3].protocol.resume_writing()
    clients[0].protocol.pause_writing()
    assert not clients[2].transport.aborted


def test_the_limit_of_open_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 1_000_000), (1024, 4096), (1024, 1024), (100, 100), (resource.RLIM_INFINITY,) * 2]
    raised: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda *arguments: raised.append(arguments))
    found = []
    for soft, hard in limits:
        monkeypatch.setattr(resource, "getrlimit", lambda which, both=(soft, hard): both)
        found.append(possible_connections())
    assert found == [16_384, 3840, 768, 1, 16_384]
    assert raised[:2] == [(resource.RLIMIT_NOFILE, (16_640, 1_000_000)), (resource.RLIMIT_NOFILE, (4096, 4096))]
