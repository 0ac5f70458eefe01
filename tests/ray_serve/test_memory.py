"""More replicas than memory are refused, with figures that are those of the model."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from support.model_zoo import build, build_supported
from support.quantised_checkpoints import gptq, write

from radixkv import LLM
from radixkv.engine import kv_tiers
from radixkv.llm_options import LLMOptions
from radixkv.memory import spare_rows
from radixkv.model.gguf.conversion import converted_folder
from radixkv.ray.memory import ReplicaMemory, available_memory, check_memory, replica_memory
from radixkv.tiers.disk_tier import DiskTier


def test_weights_and_pool_are_those_that_the_engine_has(tmp_path: Path) -> None:
    model = build_supported("llama")
    model.save_pretrained(tmp_path)
    weights = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    engine = LLM(model, num_blocks=30, block_size=8).engine
    memory = replica_memory(str(tmp_path), {"dtype": "float32", "num_blocks": 30, "block_size": 8}, on_gpu=False)
    assert memory.weights == sum(weights.values())
    assert memory.pool == engine.pool.nbytes
    half = replica_memory(str(tmp_path), {"num_blocks": 30, "block_size": 8}, on_gpu=False)
    assert half.weights == memory.weights // 2
    assert half.pool == memory.pool // 2


def test_no_block_size_is_the_default(tmp_path: Path) -> None:
    """`block_size: null`, which an engine takes, used to end the deployment of an application."""
    build_supported("llama").save_pretrained(tmp_path)
    none: LLMOptions = {"num_blocks": 30, "block_size": None}  # type: ignore[typeddict-item]
    assert replica_memory(str(tmp_path), none, on_gpu=False) == replica_memory(
        str(tmp_path), {"num_blocks": 30}, on_gpu=False
    )


def test_weights_that_others_packed_into_words_count_by_their_bytes(tmp_path: Path) -> None:
    model = build("llama", {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256})
    write(model, tmp_path, gptq(4, 64))
    stored = (tmp_path / "model.safetensors").stat().st_size
    memory = replica_memory(str(tmp_path), {"num_blocks": 30}, on_gpu=False)
    assert memory.weights is not None
    assert stored < memory.weights < 2 * stored
    floats = sum(parameter.numel() for parameter in model.parameters())
    assert memory.weights < 2 * floats


def test_a_gguf_file_whose_name_ends_in_capitals_counts_as_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to be looked for on the hub, and its weights counted for nothing."""
    monkeypatch.setenv("RADIXKV_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "TINY.GGUF"
    path.touch()
    build_supported("llama").save_pretrained(converted_folder(path, in_blocks=True))
    assert replica_memory(str(path), {}, on_gpu=False).weights


def test_a_folder_that_is_named_like_a_gguf_file_counts_as_a_folder(tmp_path: Path) -> None:
    build_supported("llama").save_pretrained(tmp_path / "tiny.gguf")
    assert replica_memory(str(tmp_path / "tiny.gguf"), {}, on_gpu=False).weights


def test_what_is_on_a_gpu_is_not_in_memory(tmp_path: Path) -> None:
    build_supported("llama").save_pretrained(tmp_path)
    memory = replica_memory(str(tmp_path), {"host_cache_size": "1GiB"}, on_gpu=True)
    assert (memory.weights, memory.pool, memory.tiers) == (0, 0, 1 << 30)


def test_tiers_take_memory_besides_what_they_keep() -> None:
    options: LLMOptions = {"kv_cache_memory_bytes": "1MiB", "disk_cache": "folder", "host_cache_size": "1GiB"}
    of_disk = inspect.signature(DiskTier).parameters["queue_bytes"].default
    of_all = kv_tiers._MAX_QUEUED_BYTES + spare_rows._MAX_SPARE_BYTES
    memory = replica_memory("nobody/has-this-model", options, on_gpu=False)
    assert (memory.pool, memory.tiers) == (1 << 20, (1 << 30) + of_disk + of_all)
    assert "1.62 GiB for tiers" in str(memory)


def test_a_model_that_is_not_here_yet_counts_without_its_weights() -> None:
    memory = replica_memory("nobody/has-this-model", {"kv_cache_memory_bytes": 1 << 20}, on_gpu=False)
    assert memory.weights is None
    assert memory.total == memory.process + (1 << 20)


def test_more_replicas_than_fit_are_refused_with_the_figures() -> None:
    replica = ReplicaMemory(process=1 << 30, weights=2 << 30, pool=1 << 30, tiers=0)
    check_memory(2, replica, 9 << 30, beside=1 << 30)
    check_memory(100, replica, None)
    message = (
        r"replicas: 3 would take 12.00 GiB \(4.00 GiB each: 1.00 GiB for keys and values, 2.00 GiB for weights, 1.00 GiB "
        r"for its process\) beside 1.00 GiB for Ray and the ingress, and 9.50 GiB are available, enough for 2; lower replicas"
    )
    with pytest.raises(MemoryError, match=message):
        check_memory(3, replica, 19 << 29, beside=1 << 30)


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 32 kB\nMemAvailable:       4096 kB\n")
    limit = {"memory.max": "3000000\n", "memory.current": "2000000\n", "memory.stat": "anon 5\ninactive_file 400000\n"}
    assert available_memory(tmp_path, tmp_path / "none") == 4096 << 10
    for name, text in limit.items():
        (tmp_path / name).write_text(text)
    assert available_memory(tmp_path, tmp_path) == 1_400_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path, tmp_path) == 4096 << 10
    assert available_memory(tmp_path / "none") is None


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\n"])
def test_weights_that_are_not_there_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: expected a safetensors file"):
        replica_memory(str(tmp_path), {}, on_gpu=False)
