"""How many blocks a pool gets; a GPU's memory is made up here."""

from __future__ import annotations

import pytest
import torch
from support.model_zoo import build_supported

from radixkv.model.loader import load_model
from radixkv.model.pool_sizing import choose_num_blocks
from radixkv.model.runner import ModelRunner
from radixkv.sampling.exponential import draw_in_every_way

CUDA = torch.device("cuda")


def choose(
    device: torch.device, bytes_wanted: int | None = None, utilization: float = 0.9, activations: int = 0
) -> int:
    return choose_num_blocks(
        100,
        5000,
        device,
        kv_cache_memory_bytes=bytes_wanted,
        gpu_memory_utilization=utilization,
        measure_activations=lambda: activations,
    )


def test_bytes_that_are_asked_for_are_taken_everywhere() -> None:
    assert choose(torch.device("cpu"), 1099) == choose(CUDA, 1099) == 10
    with pytest.raises(ValueError, match="kv_cache_memory_bytes must hold at least one block of 100 bytes, got 99"):
        choose(CUDA, 99)


def test_a_cpu_takes_no_more_than_is_useful() -> None:
    assert choose(torch.device("cpu")) == 5000


def test_a_gpu_gives_what_weights_others_and_the_largest_step_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60_000, 100_000))
    assert choose(CUDA, activations=10_000) == (90_000 - 40_000 - 10_000) // 100
    with pytest.raises(ValueError, match=r"gpu_memory_utilization: 0.5 of .* less than a block of 100 bytes"):
        choose(CUDA, utilization=0.5, activations=10_000)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization: expected above 0 and up to 1, got 1.5"):
        choose(CUDA, utilization=1.5)


@pytest.mark.parametrize("name", ["llama", "biogpt"])
def test_the_largest_step_may_have_more_tokens_than_a_model_has_positions(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """biogpt looks positions up in a table; beyond its end a GPU would give up for good."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000)
    loaded = load_model(build_supported(name))
    assert ModelRunner(loaded).measure_activations(2 * loaded.max_model_len + 1, 4, draw_in_every_way) == 900
