"""A run in which nothing was disturbed is no success."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
import pytest
from rich.console import Console

from radixkv.bench.cluster import chaos
from radixkv.cli.consoles import console_for


class Process:
    """A replica or an ingress that is up at once."""

    address = "http://127.0.0.1"

    def kill(self) -> None:
        pass

    def start(self) -> None:
        pass

    def wait_until_up(self) -> None:
        pass


@contextmanager
def pretended_cluster(num_replicas: int, *_: object) -> Iterator[tuple[dict[str, Any], Any]]:
    yield {str(number): Process() for number in range(num_replicas)}, Process()


async def never(*_: object) -> None:
    pass


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    texts: Iterator[str],
    kill_replicas: Callable[..., Coroutine[Any, Any, None]] = never,
) -> None:
    """A cluster without processes, in which each stream ends at once with the next text."""

    async def answer(*_: object) -> str:
        return next(texts)

    monkeypatch.setattr(chaos, "cluster", pretended_cluster)
    monkeypatch.setattr(chaos._Chaos, "_stream", answer)
    monkeypatch.setattr(chaos._Chaos, "kill_replicas", kill_replicas)


def run(console: Console, streams: int) -> bool:
    """Kill without pauses."""
    return chaos.run_chaos(
        console,
        None,
        num_replicas=2,
        streams=streams,
        concurrency=16,
        seconds_between_kills=0.0,
        answer_tokens=48,
        seed=0,
        json_path=None,
    )


def test_a_replica_that_does_not_start_again_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as up, and the run succeeded on the replicas that were left."""

    class Broken(Process):
        killed = False

        def kill(self) -> None:
            assert not self.killed, "killed once more, as if it were up"
            self.killed = True

        def wait_until_up(self) -> None:
            raise ValueError("it did not start")

    async def fail(*_: object) -> None:
        raise ValueError("it did not start")

    replicas: Any = {name: Broken() for name in ("r0", "r1")}
    ingress: Any = Process()
    with pytest.raises(ValueError, match="it did not start"):
        asyncio.run(chaos._Chaos(replicas, ingress, 0.0, 48, 0).kill_replicas())
    pretend(monkeypatch, itertools.repeat("text"), kill_replicas=fail)
    with pytest.raises(ValueError, match="it did not start"):
        run(Console(quiet=True), streams=2)


def test_an_ingress_that_does_not_start_again_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clients sent their requests again for ever."""

    class Broken(Process):
        def wait_until_up(self) -> None:
            raise ValueError("it did not start")

    async def broken_off(*_: object) -> str:
        raise httpx.ConnectError("nobody listens")

    async def main() -> None:
        ingress: Any = Broken()
        disturbed = chaos._Chaos({}, ingress, 0.0, 48, 0)
        with pytest.raises(ValueError, match="it did not start"):
            await disturbed.kill_ingress()
        async with asyncio.timeout(600):
            assert [type(text) for text in await disturbed.answer_all(3, 16)] == [httpx.ConnectError] * 3

    monkeypatch.setattr(chaos._Chaos, "_stream", broken_off)
    asyncio.run(main())


def test_texts_that_differ_are_printed_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What they have in brackets was taken for markup, which ended the command before its figures were written."""
    monkeypatch.setenv("COLUMNS", "200")
    pretend(monkeypatch, iter(["[red] oak", "[/INST] elm"]))
    assert not run(console_for(), streams=1)
    assert "0 greedy: '[red] oak' became '[/INST] elm'" in capsys.readouterr().out


def test_streams_that_end_before_a_replica_is_killed_prove_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It succeeded, because all texts were the same."""
    pretend(monkeypatch, itertools.repeat("text"))
    assert not run(Console(width=200), streams=2)
    assert "no replica was killed" in capsys.readouterr().out


def test_a_line_separator_in_a_text_is_not_the_end_of_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a stream failed: its line was cut inside of a JSON string."""
    event = {"choices": [{"text": "oak\u2028elm", "finish_reason": None}]}
    end = {"choices": [{"text": ".", "finish_reason": "stop"}]}
    streams = [[event, end], [event]]

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(
            200, text="".join(f"data: {json.dumps(e, ensure_ascii=False)}\n\n" for e in streams.pop(0))
        )

    client = partial(httpx.AsyncClient, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(chaos.httpx, "AsyncClient", client)
    ingress: Any = Process()
    disturbed = chaos._Chaos({}, ingress, 0.0, 48, 0)
    assert asyncio.run(disturbed._stream({})) == "oak\u2028elm."
    with pytest.raises(httpx.ReadError, match="broke off"):
        asyncio.run(disturbed._stream({}))
