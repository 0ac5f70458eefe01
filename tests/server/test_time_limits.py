"""Requests that take longer than they may: a clear error, and their blocks are released."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from support.held_steps import HeldSteps
from support.in_process_server import make_client, served
from support.time_limit import HANGING

from radixkv import LLM, AsyncLLM
from radixkv.server.chat import prefix_keeper
from radixkv.server.config import ServerConfig
from radixkv.server.time_limits import Deadlines, TimeLimits
from radixkv.serving.request_stream import RequestStream

# None of these requests would end by itself before the test does, however slow the machine: limits may be short.
BODY = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}
SOON = 0.05


@pytest.fixture
def llm(default_llm: LLM) -> LLM:
    """A tiny model might be done with them before their time is up."""
    return default_llm


def errors(llm: LLM, limits: ServerConfig, *, streams: tuple[bool, ...] = (False, True), **options: Any) -> list[str]:
    """What is wrong with the answers in full and streamed; after each, nothing runs and no block is in use."""

    async def main() -> list[str]:
        found = []
        async with AsyncLLM(llm) as engine, make_client(engine, config=limits) as client:
            for stream in streams:
                response = await client.post("/v1/completions", json={**BODY, **options, "stream": stream})
                # The status of a stream is sent when its request was queued, before its end is known.
                assert response.status_code in ((200, 504) if stream else (504,)), response.text
                if response.status_code == 504:  # clients send it again by themselves, unless a header forbids it
                    in_queue = "waited in the queue" in response.text
                    assert response.headers.get("x-should-retry") == (None if in_queue else "false")
                lines = [line.removeprefix("data: ") for line in response.text.splitlines() if '"error"' in line]
                error = json.loads(lines[-1])["error"]
                assert (error["type"], error["code"], len(lines)) == ("server_error", "timeout", 1)
                found.append(error["message"])
                assert not await engine.call(lambda engine: engine.has_unfinished_requests)
                assert engine.stats.num_blocks_in_use == 0
                assert engine.num_unfinished == 0
        return found

    return asyncio.run(main())


def test_a_request_that_stays_in_the_queue_is_ended(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine.scheduler, "schedule", list)  # admits none
    expected = f"the request waited in the queue for {SOON} seconds, which is the limit"
    assert (
        errors(llm, ServerConfig(queue_timeout=SOON, first_token_timeout=2 * SOON, request_timeout=900))
        == [expected] * 2
    )
    assert errors(llm, ServerConfig(queue_timeout=SOON), prompt=[[7], [8]], streams=(False,)) == [expected]


async def test_a_request_in_the_queue_is_ended_while_a_step_takes_longer(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit took effect when the step had ended: between two steps, the engine was asked how far the request was."""
    monkeypatch.setattr(llm.engine, "step", llm.engine.step)  # so that it is held during this test only
    async with AsyncLLM(llm) as engine, make_client(engine, config=ServerConfig(queue_timeout=SOON)) as client:
        steps = await engine.call(HeldSteps)
        try:
            response = await asyncio.wait_for(client.post("/v1/completions", json=BODY), HANGING)
        finally:
            steps.allow_all()
        assert response.status_code == 504
        assert "waited in the queue" in response.text


def test_of_equal_limits_that_of_the_queue_counts_first(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were in the order of their messages: a request that had only waited was not to be retried."""
    monkeypatch.setattr(llm.engine.scheduler, "schedule", list)  # admits none
    expected = f"the request waited in the queue for {SOON} seconds, which is the limit"
    limits = ServerConfig(queue_timeout=SOON, first_token_timeout=SOON, request_timeout=SOON)
    assert errors(llm, limits, streams=(False,)) == [expected]


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/completions", BODY), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})],
)
async def test_a_request_that_is_not_tokenized_in_time_times_out(llm: LLM, path: str, fields: dict[str, Any]) -> None:
    """The limits began after it, and others' long texts could keep a request there for as long as they took."""
    go = threading.Event()
    async with AsyncLLM(llm) as engine, make_client(engine, config=ServerConfig(queue_timeout=SOON)) as client:
        others = asyncio.create_task(engine.run_tokenizer(lambda _: go.wait(), num_slots=0))
        await asyncio.sleep(0)  # theirs is the first
        try:
            response = await asyncio.wait_for(client.post(path, json=fields), HANGING)
        finally:
            go.set()
        await others
        assert response.status_code == 504
        expected = f"the request waited in the queue for {SOON} seconds, which is the limit"
        assert response.json()["error"]["message"] == expected
        assert engine.num_unfinished == 0


MARKED: dict[str, Any] = {"content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}
BREAKPOINT: dict[str, Any] = {
    "content": [{"type": "text", "text": "Hi", "prompt_cache_breakpoint": {"mode": "explicit"}}]
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "message", "limits", "expected"),
    [
        ("/v1/messages", MARKED, ServerConfig(first_token_timeout=SOON), "had no token within"),
        ("/v1/messages", MARKED, ServerConfig(request_timeout=SOON), "was not finished within"),
        ("/v1/chat/completions", BREAKPOINT, ServerConfig(request_timeout=SOON), "was not finished within"),
    ],
)
async def test_time_limits_hold_while_marked_prefixes_are_tokenized(
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    message: dict[str, Any],
    limits: ServerConfig,
    expected: str,
    stream: bool,
) -> None:
    """They are found by the tokenizer, and no limit used to hold while it was busy with others' texts."""
    go = threading.Event()
    monkeypatch.setattr(prefix_keeper, "marked_prefixes", lambda *arguments: go.wait() and {})
    async with served(llm, config=limits) as client:
        body = {"model": "model", "max_tokens": 1, "messages": [{"role": "user", **message}], "stream": stream}
        try:
            response = await asyncio.wait_for(client.post(path, json=body), HANGING)
        finally:
            go.set()
        assert f"the request {expected} {SOON} seconds, which is the limit" in response.text
        assert response.status_code in ((200, 504) if stream else (504,))


def test_a_request_without_a_first_token_is_ended(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, once = llm.engine.scheduler.schedule, iter([True])
    # Computes a part of the prompt, and then nothing more.
    monkeypatch.setattr(llm.engine.scheduler, "schedule", lambda: schedule() if next(once, False) else [])
    expected = f"the request had no token within {SOON} seconds, which is the limit"
    assert errors(llm, ServerConfig(first_token_timeout=SOON), streams=(False,), prompt=[7] * 600) == [expected]


def test_a_request_that_is_not_finished_is_ended(llm: LLM) -> None:
    expected = f"the request was not finished within {SOON} seconds, which is the limit"
    assert errors(llm, ServerConfig(request_timeout=SOON)) == [expected] * 2


@pytest.mark.parametrize("stage", ["tokenizing", "admission", "queue", "total"])
async def test_each_choice_is_counted_as_aborted(llm: LLM, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """Before a prompt is queued it counts once, as it was not checked yet how many choices it may have."""
    watch, queued = Deadlines.watch, stage in ("queue", "total")

    def watch_late(deadlines: Deadlines, streams: Sequence[RequestStream]) -> None:
        deadlines.arrival -= 1000.0  # its time is over once it is queued, however long that takes
        watch(deadlines, streams)

    monkeypatch.setattr(Deadlines, "watch", watch_late)

    async def never(*arguments: Any, **options: Any) -> Any:
        await asyncio.Event().wait()

    async with AsyncLLM(llm) as engine, make_client(engine) as client:
        if stage == "tokenizing":
            monkeypatch.setattr(engine, "run_tokenizer", never)
        elif stage == "admission":
            monkeypatch.setattr(engine, "submit", never)
        elif stage == "queue":
            monkeypatch.setattr(llm.engine.scheduler, "schedule", list)  # admits none
        body = {**BODY, "prompt": [[7], [8]], "n": 2 if queued else 10**12, "temperature": 1}
        body["timeout"] = 900 if queued else SOON
        assert (await client.post("/v1/completions", json=body)).status_code == 504
        lines = (await client.get("/metrics")).text.splitlines()
        counts = [line for line in lines if line.startswith("radixkv:request_success_total")]
        assert counts == [f'radixkv:request_success_total{{finished_reason="abort"}} {4.0 if queued else 2.0}']
        assert "radixkv:e2e_request_latency_seconds_count 2.0" in lines


def test_a_request_has_a_limit_of_its_own(llm: LLM) -> None:
    expected = f"the request was not finished within {SOON} seconds, which is the limit"
    assert errors(llm, ServerConfig(request_timeout=900), timeout=SOON, streams=(True,)) == [expected]


async def test_a_request_within_all_limits_is_answered(llm: LLM) -> None:
    limits = ServerConfig(queue_timeout=900, first_token_timeout=900, request_timeout=900)
    async with AsyncLLM(llm) as engine, make_client(engine, config=limits) as client:
        response = await client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2, "timeout": 900})
        assert response.status_code == 200
        invalid = await client.post("/v1/completions", json={"prompt": "Once", "timeout": 0})
        assert invalid.json()["error"]["param"] == "timeout"
    assert len(asyncio.all_tasks()) == 1  # nothing watches any longer


async def test_another_s_timeout_is_not_reported_as_the_limit() -> None:
    deadlines = Deadlines(MagicMock(), TimeLimits(total=900), Mock())
    error = TimeoutError("the tokenizer's file system")
    for within in (deadlines.before_admission(), deadlines.within_first_token_limit(), deadlines.within_total_limit()):
        with pytest.raises(TimeoutError) as raised:
            async with within:
                raise error
        assert raised.value is error


def test_a_request_cannot_raise_the_server_s_limit() -> None:
    assert TimeLimits(total=5).at_most(9).total == 5
    assert TimeLimits(total=5).at_most(2).total == 2
    assert TimeLimits().at_most(2).total == 2
    assert TimeLimits(queue=1).at_most(None) == TimeLimits(queue=1)
