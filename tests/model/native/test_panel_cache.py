"""A model is quantised once: afterwards its weights are read from disk, or made again where the disk's are wrong."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from support.model_zoo import WIDE, build

from radixkv.config import ModelConfig
from radixkv.model.loader import load_model
from radixkv.model.native import panel_cache, weights_of
from radixkv.model.native.panel_cache import PanelCache
from radixkv_cpu import library, quantised

pytestmark = pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder; its cache is empty."""
    monkeypatch.setenv("RADIXKV_CACHE", f"{tmp_path / 'cache'}")
    build("llama", WIDE).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records how each weight is quantised that is not read from disk."""
    kinds: list[str] = []
    quantise = quantised._quantised_panels

    def watch(weights: torch.Tensor, quantization: str) -> torch.Tensor:
        kinds.append(quantization)
        return quantise(weights, quantization)

    monkeypatch.setattr(quantised, "_quantised_panels", watch)
    return kinds


def panels_of(model: Path, quantization: str = "int4", dtype: str = "float32") -> list[torch.Tensor]:
    return [
        weight.panels
        for weight in weights_of(load_model(model, ModelConfig(quantization=quantization, dtype=dtype)).model)
    ]


def test_a_model_is_quantised_once_and_then_read(model: Path, made: list[str]) -> None:
    first = panels_of(model)
    assert sorted(made) == ["int4"] * 12 + ["int8"]
    again = panels_of(model)
    assert len(made) == 13
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)


def test_other_weights_bits_or_types_are_quantised_anew(model: Path, made: list[str], tmp_path: Path) -> None:
    panels_of(model)
    changed = build("llama", WIDE)
    changed.model.layers[1].mlp.down_proj.weight.data[3, 4] += 1.0
    changed.save_pretrained(tmp_path / "changed")
    panels_of(tmp_path / "changed")
    assert made[13:] == ["int4"]
    # The head has 8 bits in both.
    panels_of(model, "int8")
    assert made[14:] == ["int8"] * 12
    panels_of(model, dtype="bfloat16")
    assert len(made) == 26 + 13


@pytest.mark.parametrize("damage", ["a byte", "half", "all"])
def test_what_is_damaged_is_made_again(
    damage: str, model: Path, made: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = panels_of(model)
    made.clear()
    victim = min((tmp_path / "cache" / "quantised").iterdir())
    content = bytearray(victim.read_bytes())
    content[-5] ^= 1
    victim.write_bytes({"a byte": content, "half": content[: len(content) // 2], "all": b""}[damage])
    for one, other in zip(expected, panels_of(model), strict=True):
        assert torch.equal(one, other)
    assert len(made) == 1
    assert [
        record.message for record in caplog.records if "damaged" in record.message and victim.name in record.message
    ]
    panels_of(model)
    assert len(made) == 1


def test_a_disk_that_refuses_is_tried_once(
    model: Path, made: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "quantised").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        panels_of(model)
    assert len(made) == 13
    assert len([record for record in caplog.records if "cannot be kept" in record.message]) == 1


def test_a_disk_that_fills_up_keeps_no_half_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each would stay for 90 days, on a disk that is full."""
    cache = PanelCache(tmp_path)

    def save_half(tensors: object, path: str, metadata: object) -> None:
        Path(path).write_bytes(b"half")
        raise SafetensorError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(panel_cache, "save_file", save_half)
        cache.write("key", torch.ones(3))
    cache.write("key", torch.ones(3))
    assert not [*tmp_path.iterdir()]
    assert len(caplog.records) == 1


def test_models_in_memory_leave_nothing_on_the_disk(made: list[str], model: Path, tmp_path: Path) -> None:
    load_model(build("llama", WIDE), ModelConfig(quantization="int4"))
    assert len(made) == 13
    assert not (tmp_path / "cache").exists()
