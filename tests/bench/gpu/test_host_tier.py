"""The rows about host memory come from there, which a CPU's engine shows as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from rich.table import Table
from support.model_zoo import build_shallow

from radixkv import LLM
from radixkv.bench.gpu import host_tier
from radixkv.bench.gpu.host_tier import FirstToken, measure_host_tier


class Report:
    """Keeps the rows; a failure ends the test."""

    def __init__(self) -> None:
        self.rows: dict[str, FirstToken] = {}

    def measure(self, name: str, work: Callable[[], FirstToken]) -> FirstToken:
        self.rows[name] = work()
        return self.rows[name]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(host_tier, "_POOL_TOKENS", 512)
    monkeypatch.setattr(host_tier, "LENGTHS", (100, 300))
    monkeypatch.setattr(host_tier, "TIMES", 3)


@pytest.mark.usefixtures("small", "loads_are_worth_it")
def test_prompts_come_from_where_their_rows_say() -> None:
    report = Report()
    measure_host_tier(cast(Any, report), Table(*"abcdefg"), build_shallow("llama"))
    loaded = {name.removeprefix("host tier: "): row.loaded_tokens for name, row in report.rows.items()}
    assert loaded.pop("100 tokens, loaded from the host") >= 100 - 3 * 16
    assert loaded.pop("300 tokens, loaded from the host") >= 300 - 3 * 16
    assert len(loaded) == 4
    assert not any(loaded.values())


@pytest.mark.usefixtures("small")
def test_a_row_whose_prompt_was_not_loaded_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "_first_token", lambda llm, prompt: FirstToken(0.1, 0))
    llm = LLM(build_shallow("llama"), num_blocks=32, block_size=16, host_cache_size="8MiB")
    with llm, pytest.raises(RuntimeError, match="only 0 of 100 tokens were loaded"):
        host_tier._loaded(llm, lambda length: [5] * length, 100)
