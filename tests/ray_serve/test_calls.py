"""Calls to a registry that is away for a while."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from radixkv.ray import calls


def test_what_starts_while_the_registry_is_restarted_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It failed, after it had loaded its model; and Serve gives an application or an update up after one such failure."""
    monkeypatch.setattr(calls, "RENEWAL_SECONDS", 0.0)
    answers = iter([ActorDiedError(), TimeoutError(), None, "the secret of all"])

    async def secret(proposed: str) -> str | None:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    registry: Any = SimpleNamespace(secret=SimpleNamespace(remote=secret))
    assert asyncio.run(calls.shared_secret(registry)) == "the secret of all"
    assert len(caplog.messages) == 2


def test_what_is_repeated_goes_on_after_calls_that_failed_and_logs_that_once(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = iter([TimeoutError(), ActorDiedError(), None, TimeoutError(), ValueError("planted")])

    async def step() -> None:
        outcome = next(outcomes)
        if outcome is not None:
            raise outcome

    with pytest.raises(ValueError, match="planted"):
        asyncio.run(calls.repeat("asking for replicas", step, 0.0))
    assert caplog.messages == [
        "asking for replicas: TimeoutError(); trying again",
        "asking for replicas: TimeoutError(); trying again",
    ]


async def test_a_call_that_is_not_answered_ends() -> None:
    with pytest.raises(TimeoutError):
        await calls.answer_of(asyncio.Event().wait(), 0.0)
