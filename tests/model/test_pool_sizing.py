"""The number of blocks of a pool; a GPU's memory is simulated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.model_zoo import build_supported

from radixkv.attention.triton.cost_model import MAX_LEVELS
from radixkv.config import ResolvedEngineConfig
from radixkv.engine import pool_setup
from radixkv.engine.speculator_setup import max_draft_rows
from radixkv.memory import KVPool, LayerShape
from radixkv.model.loader import load_model
from radixkv.model.pool_sizing import choose_num_blocks
from radixkv.model.runner import ModelRunner
from radixkv.sampling.sampler import sample_in_every_way
from radixkv.scheduling.logit_rows import PROMPT_LOGIT_ROWS

CUDA = torch.device("cuda")


def num_blocks(
    device: torch.device,
    kv_cache_memory_bytes: int | None = None,
    utilization: float = 0.9,
    activations: int = 0,
    graphs: int = 0,
) -> int:
    return choose_num_blocks(
        100,
        5000,
        device,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        gpu_memory_utilization=utilization,
        measure_activations=lambda: activations,
        measure_graphs=lambda: graphs,
    )


def test_given_bytes_are_used_on_every_device() -> None:
    assert num_blocks(torch.device("cpu"), 1099) == num_blocks(CUDA, 1099) == 10
    with pytest.raises(ValueError, match="kv_cache_memory_bytes must hold at least one block of 100 bytes, got 99"):
        num_blocks(CUDA, 99)


def test_a_cpu_pool_is_no_larger_than_useful() -> None:
    assert num_blocks(torch.device("cpu")) == 5000


def test_a_gpu_pool_takes_the_memory_that_weights_others_graphs_and_the_largest_step_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60_000, 100_000))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert num_blocks(CUDA, activations=10_000) == (90_000 - 40_000 - 10_000) // 100
    assert num_blocks(CUDA, activations=10_000, graphs=5_000) == (90_000 - 40_000 - 15_000) // 100
    with pytest.raises(ValueError, match=r"gpu_memory_utilization: 0.5 of .* less than a block of 100 bytes"):
        num_blocks(CUDA, utilization=0.5, activations=10_000)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization: expected above 0 and up to 1, got 1.5"):
        num_blocks(CUDA, utilization=1.5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0),
        ({"speculative_config": {"num_speculative_tokens": 16}}, 4 * 64),
        ({"speculative_config": {"num_speculative_tokens": 1}}, 64),
        ({"speculative_config": {"num_speculative_tokens": 16}, "max_num_batched_tokens": 100}, 36),
        ({"speculative_config": {"num_speculative_tokens": 16}, "max_num_batched_tokens": 32}, 0),
    ],
)
def test_there_is_room_for_as_many_drafts_as_a_step_may_have(options: dict[str, Any], expected: int) -> None:
    given = {"max_num_batched_tokens": 8192, "enable_torch_compile": False, "async_scheduling": False, **options}
    config = ResolvedEngineConfig(max_num_seqs=64, **given)
    assert max_draft_rows(config) == expected


@pytest.fixture
def memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000)


@pytest.mark.usefixtures("memory_of_a_gpu")
def test_the_largest_step_has_room_for_a_partial_result_of_each_level_of_a_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = load_model(build_supported("llama"))
    runner, allocated, empty = ModelRunner(loaded), [], torch.empty

    def note(*size: int, **options: object) -> torch.Tensor:
        tensor = empty(*size, **options)
        allocated.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", note)
    runner.measure_activations(100, 4, sample_in_every_way)
    config = loaded.model.config
    row = 4 * config.num_attention_heads * (config.head_dim + 1)  # results and log-sum-exps in float32
    assert max(allocated) >= 100 * (MAX_LEVELS + 1) * row


@pytest.mark.usefixtures("memory_of_a_gpu")
@pytest.mark.parametrize("name", ["llama", "biogpt"])
def test_the_largest_step_may_have_more_tokens_than_a_model_has_positions(
    name: str,
) -> None:
    """biogpt looks positions up in a table; reading beyond its end is a fatal error on a GPU."""
    loaded = load_model(build_supported(name))
    assert ModelRunner(loaded).measure_activations(2 * loaded.max_model_len + 1, 4, sample_in_every_way) == 900


def test_graphs_are_measured_over_a_single_block_before_the_pool_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []

    class Runner:
        layer_shapes = (LayerShape(1, 4, 4),)
        recurrent_layers = ()

        def use_pool(self, pool: KVPool, *rest: object) -> None:
            done.append(f"pool of {pool.num_blocks}")

        def measure_activations(self, *rest: object) -> int:
            return 7

        def measure_graphs(self, free_memory: object) -> int:
            done.append("graphs")
            return 5

    def choose(*rest: object, **measures: Any) -> int:
        done.append(measures["measure_activations"]() + measures["measure_graphs"]())
        return 3

    monkeypatch.setattr(pool_setup, "choose_num_blocks", choose)
    loaded: Any = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, original_max_model_len=64)
    given = {"max_num_batched_tokens": 64, "enable_torch_compile": False, "async_scheduling": False}
    runner: Any = Runner()
    pool = pool_setup.set_up_pool(runner, loaded, ResolvedEngineConfig(max_num_seqs=4, **given), torch.float32)
    assert done == ["pool of 1", "graphs", 12, "pool of 3"]
    assert pool.num_blocks == 3


def test_the_step_that_is_measured_has_logits_of_all_sequences_and_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows for the log-probabilities of prompts come on top of those that decode."""
    rows: list[int] = []

    def measure_activations(num_tokens: int, num_logit_rows: int, use_logits: object) -> int:
        rows.append(num_logit_rows)
        return 0

    def choose(*rest: object, **measures: Any) -> int:
        measures["measure_activations"]()
        return 1

    monkeypatch.setattr(pool_setup, "choose_num_blocks", choose)
    loaded: Any = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, original_max_model_len=64)
    runner: Any = SimpleNamespace(
        layer_shapes=[LayerShape(1, 4, 4)],
        recurrent_layers=[],
        use_pool=lambda *rest: None,
        measure_activations=measure_activations,
    )
    given = {"max_num_batched_tokens": 64, "enable_torch_compile": False, "async_scheduling": False}
    pool_setup.set_up_pool(runner, loaded, ResolvedEngineConfig(max_num_seqs=300, **given), torch.float32)
    assert rows == [300 + PROMPT_LOGIT_ROWS]
