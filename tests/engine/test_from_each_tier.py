"""What one engine computed, another takes from a disk, a folder or a server, and answers as if it had computed it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.dict_tier import DictTier
from support.key_value_server import EXECUTABLE, KeyValueServer
from support.tiered_llm import GREEDY, PROMPTS, answers, evict_all, free_blocks, make

from radixkv import LLM, SamplingParams
from radixkv.engine import open_tiers
from radixkv.tiers.block_format import BlockFormat
from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.disk_tier import DiskTier
from radixkv.tiers.folder_blobs import FolderBlobs
from radixkv.tiers.host_tier import HostTier
from radixkv.tiers.redis_blobs import RedisBlobs
from radixkv.tiers.shared_tier import SharedTier
from radixkv.tiers.stats import StoreStats
from radixkv.tiers.tier import BlockBytes, Tier

pytestmark = pytest.mark.usefixtures("loads_are_worth_it", "look_ups_are_awaited")


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
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
        monkeypatch.setattr(open_tiers, "RedisBlobs", partial(RedisBlobs, timeout=600))  # however busy the machine
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
        ("qwen3_next", {}, "server", "shared"),  # states of recurrent layers
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
        assert [output.num_cached_tokens for output in outputs] == [40] * 3
        assert [output.metrics.loaded_tokens for output in outputs] == [{medium: 40}] * 3
        assert free_blocks(second) == 80


class Mirror:
    """Several tiers: what is put goes to all of them, and one at a time is read."""

    medium = "mirror"
    stats = StoreStats()

    def __init__(self) -> None:
        self.tiers: list[Tier] = []
        self.read: Tier = DictTier()

    def contains_prefix(self, keys: Sequence[BlockKey]) -> int:
        return self.read.contains_prefix(keys)

    def get_many(self, keys: Sequence[BlockKey], out: BlockBytes) -> int:
        return self.read.get_many(keys, out)

    def put_many(self, keys: Sequence[BlockKey], blocks: BlockBytes) -> None:
        for tier in self.tiers:
            tier.put_many(keys, blocks)

    def clear(self, namespace: bytes | None = None) -> None:
        for tier in self.tiers:
            tier.clear(namespace)

    def flush(self, timeout: float | None = None) -> bool:
        flushed = [tier.flush(timeout) for tier in self.tiers]
        return all(flushed)

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()


def test_the_default_model_answers_the_same_from_every_tier(tmp_path: Path) -> None:
    stem = "You are the assistant of a small public library. Answer in one sentence, and name the shelf. " * 6
    prompts = [stem + question for question in ("Where are novels of the sea?", "Is there a map of Lisbon?")]
    mirror = Mirror()
    with LLM(dtype="float32", block_size=16, num_blocks=100, tiers=[mirror]) as llm:
        size = llm.engine.pool.block_nbytes
        block_format = BlockFormat(b"the default model", 16, size)
        mirror.tiers += [
            HostTier(64 << 20, size),
            DiskTier(tmp_path / "disk", block_format, capacity_bytes=64 << 20),
            DiskTier(tmp_path / "sealed", block_format, capacity_bytes=64 << 20, key=bytes(32)),
            SharedTier(FolderBlobs(tmp_path / "shared", capacity_bytes=64 << 20), block_format),
        ]
        server = KeyValueServer() if EXECUTABLE is not None and find_spec("redis") is not None else None
        try:
            if server is not None:
                mirror.tiers.append(SharedTier(RedisBlobs(server.url, timeout=600), block_format))
            expected = answers(llm, prompts)
            for tier in mirror.tiers:
                mirror.read = tier
                evict_all(llm)
                outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
                assert [output.outputs[0].token_ids for output in outputs] == expected, tier
                assert all(output.metrics.loaded_tokens["mirror"] > 100 for output in outputs), tier
                assert tier.stats.hit_blocks > 6
            assert free_blocks(llm) == 100
            llm.shutdown()
        finally:
            if server is not None:
                server.kill()


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
