"""Workloads have the lengths that their names give, and conversations include their answers."""

from __future__ import annotations

from typing import Any

from radixkv.bench.engine.e2e import run_workload
from radixkv.bench.engine.workloads import Workload, make_workloads


def test_prompts_have_the_lengths_in_their_names(default_tokenizer: Any) -> None:
    workloads = {workload.name: workload for workload in make_workloads(default_tokenizer)}
    chats = workloads["16 chats, one 1,000-token system prompt, 64 new"].waves[0]
    assert len(chats) == 16
    assert all(prompt[:1000] == chats[0][:1000] for prompt in chats)
    assert len({tuple(prompt) for prompt in chats}) == 16
    assert [len(p) for p in workloads["16 unrelated prompts of 240, 64 new"].waves[0]] == [240] * 16


def test_a_chained_wave_extends_the_conversations_with_their_answers() -> None:
    seen: list[list[list[int]]] = []

    def answer(prompts: list[list[int]], workload: Workload) -> list[list[int]]:
        seen.append(prompts)
        return [[90 + len(seen)] for _ in prompts]

    run_workload(answer, Workload("", [[[1], [2]], [[3], [4]]], 1, chained=True))
    assert seen == [[[1], [2]], [[1, 91, 3], [2, 91, 4]]]
