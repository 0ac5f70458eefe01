"""What a model refuses whose weights were packed: replaced modules have them, and not as they were."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.model_zoo import build_supported
from torch import nn

from radixkv.model.loader import load_model


@pytest.mark.parametrize("native", [True, False])
def test_a_model_whose_weights_were_packed_is_not_saved_without_them(native: bool, tmp_path: Path) -> None:
    """A checkpoint was written that lacked almost all of them."""
    model = build_supported("llama")
    for _ in range(2):
        load_model(model, native=native)
    with pytest.raises(RuntimeError, match=r"^LlamaForCausalLM: its weights were packed .* save it, .*, before that$"):
        model.save_pretrained(tmp_path)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(RuntimeError, match=r"^LlamaForCausalLM: its weights were packed"):
        model.state_dict()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double, lambda model: model.to(torch.bfloat16)])
def test_a_model_whose_weights_were_packed_keeps_its_type(convert: Callable[[nn.Module], object], native: bool) -> None:
    """What was not packed was converted, and the next step failed in a module that was not the cause."""
    model = load_model(build_supported("llama"), native=native).model
    with pytest.raises(
        RuntimeError, match=r"^LlamaForCausalLM: expected torch.float32 on cpu, .* got torch\.\w+ on cpu;"
    ):
        convert(model)
    assert {tensor.dtype for tensor in (*model.parameters(), *model.buffers())} == {torch.float32}


def test_a_model_whose_weights_were_packed_stays_on_its_device() -> None:
    model = load_model(build_supported("llama")).model
    with pytest.raises(
        RuntimeError, match=r"^LlamaForCausalLM: expected torch.float32 on cpu, .* on meta; convert or move"
    ):
        model.to("meta")
    assert model.to("cpu") is model.float() is model.to(model.device, model.dtype) is model


def test_a_model_whose_weights_were_packed_is_freed_with_its_last_reference() -> None:
    """What refuses conversion had it: its memory was in use until the next garbage collection."""
    model = load_model(build_supported("llama")).model
    weak = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert weak() is None
    finally:
        gc.enable()
