"""A crash inside a step is a 500 for the requests in it and for no other; a dead engine ends the process."""

from __future__ import annotations

import asyncio
import faulthandler
import math
import threading
from typing import Any
from unittest.mock import Mock

import pytest
from support.in_process_server import make_client, served

from radixkv import LLM, AsyncLLM
from radixkv.server.config import ServerConfig
from radixkv.server.watchdog import watch_engine

BODY = {"prompt": "One, two,", "max_tokens": 5, "temperature": 0}


class Panic(BaseException):
    """Like a panic in Rust code: no `Exception`."""


@pytest.mark.parametrize("error", [ZeroDivisionError, Panic])
async def test_a_crashed_step_is_a_500_and_the_engine_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """A panic used to end the engine's thread unnoticed: requests hung, and /health stayed 200."""
    run = llm.engine._runner.run
    crashes = iter([True, True])

    def crash_twice(*arguments: Any) -> Any:
        if next(crashes, False):
            raise error("planted")
        return run(*arguments)

    monkeypatch.setattr(llm.engine._runner, "run", crash_twice)
    async with served(llm) as client:
        full = await client.post("/v1/completions", json=BODY)
        assert full.status_code == 500
        # The cause is logged, not sent to the client.
        assert "planted" not in full.text
        assert full.json()["error"]["type"] == "server_error"
        streamed = await client.post("/v1/completions", json={**BODY, "stream": True})
        assert streamed.status_code == 200
        failure, done = [line for line in streamed.text.splitlines() if line]
        assert '"type":"server_error"' in failure
        assert done == "data: [DONE]"
        assert (await client.post("/v1/completions", json=BODY)).json()["choices"][0]["finish_reason"] == "length"
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("error", [ZeroDivisionError, Panic])
def test_after_the_engine_s_death_everything_is_refused(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def broken() -> Any:
        raise error("planted")

    monkeypatch.setattr(llm.engine.scheduler, "schedule", broken)

    async def main() -> None:
        engine = AsyncLLM(llm)
        async with make_client(engine) as client:
            for _ in range(2):
                assert (await client.post("/v1/completions", json=BODY)).status_code == 500
            assert isinstance((await engine.wait_for_death()).__cause__, error)
            for path in ("/health", "/ready"):
                assert (await client.get(path)).status_code == 503

    asyncio.run(main())
    monkeypatch.undo()
    for group in [*llm.engine.scheduler.running, *llm.engine.scheduler.waiting]:
        llm.engine.abort(group.request.request_id)


async def test_a_panic_in_the_tokenizer_fails_its_request_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*arguments: Any, **options: Any) -> Any:
        raise Panic("planted")

    async with served(llm) as client:
        with monkeypatch.context() as broken:
            broken.setattr("radixkv.server.completions.as_prompts", panic)
            refused = await client.post("/v1/completions", json=BODY)
        assert refused.status_code == 500
        assert refused.json()["error"]["type"] == "server_error"
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_stuck_step_is_seen_and_fails_every_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, reached, release = [0.0], threading.Event(), threading.Event()
    schedule = llm.engine.scheduler.schedule

    def stuck() -> Any:
        reached.set()
        release.wait()
        return schedule()

    monkeypatch.setattr(llm.engine.scheduler, "schedule", stuck)
    engine = AsyncLLM(llm)
    engine._engine_thread._clock = lambda: seconds[0]
    async with make_client(engine, config=ServerConfig(step_timeout=30.0)) as client:
        in_the_step = asyncio.ensure_future(client.post("/v1/completions", json=BODY))
        await asyncio.to_thread(reached.wait)
        after_it = asyncio.ensure_future(client.post("/v1/completions", json=BODY))
        seconds[0] = 30.0
        assert (await client.get("/health")).status_code == 200
        seconds[0] = 31.0
        for path in ("/health", "/ready"):
            assert (await client.get(path)).status_code == 503
        await watch_engine(engine, 30.0)
        for request in (in_the_step, after_it):
            assert (await request).status_code == 500
        assert "more than 30 seconds" in str(engine.death)
        assert (await client.post("/v1/completions", json=BODY)).status_code == 500
        await engine.shutdown()  # without waiting for the thread
    release.set()
    engine._engine_thread.stop(grace_seconds=0.0).result(600)


@pytest.mark.parametrize("given", [math.inf, math.nan, 1e12, 0])
def test_a_time_limit_of_a_step_is_one_that_can_be_kept(given: float) -> None:
    """A limit beyond the system's timers used to raise in a task that was not awaited, so that no step was watched."""
    with pytest.raises(ValueError, match="step_timeout: expected a number above 0 and up to 1000000000"):
        ServerConfig(step_timeout=given)
    assert ServerConfig(step_timeout=1e9).step_timeout == 1e9


def test_a_watch_that_fails_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OverflowError("planted")

    monkeypatch.setattr(faulthandler, "dump_traceback_later", fail)
    with pytest.raises(OverflowError, match="planted"):
        asyncio.run(watch_engine(Mock(seconds_in_step=0.0), 1.0))
    assert "the engine is watched no longer" in caplog.text


async def test_an_engine_without_work_is_not_stuck(llm: LLM) -> None:
    seconds = [0.0]
    async with AsyncLLM(llm) as engine, make_client(engine) as client:
        engine._engine_thread._clock = lambda: seconds[0]
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        seconds[0] += 10_000
        # The engine gets the end of a request after its answer.
        while engine.seconds_in_step:
            await asyncio.sleep(0)
        for method in ("GET", "HEAD"):
            for path in ("/health", "/ready"):
                assert (await client.request(method, path)).status_code == 200
        engine.start_draining()
        # A server that finishes its work is alive: it must not be killed.
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
