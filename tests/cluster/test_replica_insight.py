"""What replicas say of their caches, where one of them says something else."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import httpx
import pytest

from radixkv.cluster.replica_insight import explain_by_replicas
from radixkv.cluster.replica_set import ReplicaSet
from radixkv.errors import ReplicasLostError
from radixkv.prompts import Prompt

RIGHT = {
    "num_prompt_tokens": 9,
    "num_reused_tokens": 4,
    "computed": [],
    "difference": None,
    "below": [],
    "replica": None,
}


class Replicas:
    """Whose answers are given."""

    def __init__(self, answers: dict[str, httpx.Response | None]) -> None:
        self._answers = answers

    async def ask_all(self, method: str, path: str, content: bytes) -> dict[str, httpx.Response | None]:
        return self._answers


def explained(**answers: Any) -> list[str | None]:
    """By which replicas two prompts are explained, whose answers are these."""
    responses = {
        name: None if answer is None else httpx.Response(200, content=answer) for name, answer in answers.items()
    }
    prompts = [Prompt(token_ids=[1, 2, 3])] * 2
    replicas = cast(ReplicaSet, Replicas(responses))
    return [each.replica for each in asyncio.run(explain_by_replicas(replicas, prompts, ""))]


def of(*explanations: dict[str, Any]) -> bytes:
    return httpx.Response(200, json=list(explanations)).content


MALFORMED = {
    "no JSON": b"<html>",
    "a number": b"5",
    "no explanations": b"[5, 5]",
    "a field less": of(RIGHT, {name: RIGHT[name] for name in RIGHT if name != "below"}),
    "one prompt": of(RIGHT),
}


@pytest.mark.parametrize("malformed", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_explanation_is_left_out(malformed: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """All others' were lost with it."""
    best = {**RIGHT, "num_reused_tokens": 8}
    with caplog.at_level(logging.WARNING):
        assert explained(a=of(RIGHT, best), b=malformed, c=of(best, RIGHT), d=None) == ["c", "a"]
    assert "replica 'b'" in caplog.text
    with pytest.raises(ReplicasLostError, match="no replica explained the prompts"):
        explained(b=malformed, d=None)
