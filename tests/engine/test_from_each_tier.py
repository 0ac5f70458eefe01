"""What one engine computed, another takes from a disk, a folder or a server, and answers as if it had computed it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.dict_tier import DictTier
from support.key_value_server import EXECUTABLE, KeyValueServer
from support.tiered_llm import GREEDY, PROMPTS, answers, free_blocks, make

from radixkv import SamplingParams


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Options of an engine with one tier."""
    if request.param == "disk":
        yield {"disk_cache": tmp_path / "disk", "disk_cache_size": "4MiB"}
    elif request.param == "folder":
        yield {"shared_cache": str(tmp_path / "shared")}
    else:
        if EXECUTABLE is None:
            pytest.skip("needs valkey-server or redis-server")
        pytest.importorskip("redis")
        secret = tmp_path / "secret"
        secret.write_text("5a" * 32)
        secret.chmod(0o600)
        server = KeyValueServer()
        yield {"shared_cache": server.url, "cache_secret_file": secret}
        server.kill()


@pytest.mark.parametrize(
    ("name", "options", "store", "medium"),
    [
        ("gemma3_text", {}, "disk", "disk"),  # sliding windows
        ("deepseek_v3", {}, "folder", "shared"),  # latent attention
        ("gpt_oss", {}, "server", "shared"),  # sinks
        ("gemma4_text", {}, "disk", "disk"),  # differing head sizes
        ("llama", {"kv_cache_dtype": "fp8"}, "folder", "shared"),
    ],
    indirect=["store"],
)
def test_what_one_engine_computed_another_loads(
    name: str, options: dict[str, Any], store: dict[str, Any], medium: str
) -> None:
    with make(name, **options, **store) as first:
        expected = answers(first)
    with make(name, **options, **store) as second:
        outputs = second.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert [output.metrics.loaded_tokens for output in outputs] == [{medium: 40}] * 3
        assert free_blocks(second) == 80


def test_a_preempted_request_takes_from_below_what_it_would_compute_again() -> None:
    prompts: list[Any] = [{"prompt_token_ids": [3 + (n * 37 + i * (n + 2)) % 190 for i in range(25)]} for n in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in make().generate(prompts, params, use_tqdm=False)]
    tier = DictTier()
    computed = []
    for options in ({}, {"tiers": [tier]}):
        llm = make(num_blocks=40, **options)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert llm.engine.scheduler.num_preemptions > 0
        assert free_blocks(llm) == 40
        computed.append(llm.engine.cache.stats.computed_tokens)
    assert tier.num_read > 0
    without, with_tier = computed
    assert with_tier < without
