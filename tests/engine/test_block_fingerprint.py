"""Block names cover everything that a block's bytes depend on: blocks that differ in any of it have different names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.model_zoo import build_shallow
from torch.testing._internal.two_tensor import TwoTensor

from radixkv import LLM
from radixkv.engine.block_fingerprint import block_fingerprint
from radixkv.memory import Fp8KVPool, KVPool, StateShape
from radixkv.memory.fp8_kv_pool import KVScales
from radixkv.memory.kv_pool import LayerShape
from radixkv.model.fingerprint import model_fingerprint
from radixkv.model.loader import LoadedModel

RECURRENT_LAYERS = [
    [[StateShape((2, 3), torch.float32)]],
    [[StateShape((3, 2), torch.float32)]],
    [[StateShape((2, 3), torch.bfloat16)]],
    [[StateShape((2, 3), torch.float32)] * 2],
    [[StateShape((2, 3), torch.float32)]] * 2,
]


class Loaded:
    """The parts of a loaded model that a name is made of."""

    fingerprint = "weights"
    dtype = torch.float32
    rope_factors: str | None = None


def name(pool: KVPool, **differs: Any) -> bytes:
    loaded: Any = Loaded()
    vars(loaded).update(differs)
    model: LoadedModel = loaded
    return block_fingerprint(model, pool)


def fp8_pool(scale: float) -> KVPool:
    scales = KVScales([torch.full((2,), scale)], [torch.ones(2)])
    return Fp8KVPool([LayerShape(2, 4, 4)], 3, 4, scales, torch.float32, torch.device("cpu"))


def test_each_thing_that_bytes_of_blocks_depend_on_changes_their_name() -> None:
    shapes = [LayerShape(2, 4, 4)]
    pool = KVPool(shapes, 3, 4, torch.float32)
    names = [
        name(pool),
        name(pool, fingerprint="other weights"),
        name(pool, dtype=torch.bfloat16),
        name(pool, rope_factors="short"),
        name(pool, rope_factors="long"),
        name(KVPool(shapes, 3, 4, torch.bfloat16)),
        name(KVPool(shapes, 3, 8, torch.float32)),
        name(KVPool([LayerShape(4, 4, 4)], 3, 4, torch.float32)),
        name(KVPool([LayerShape(2, 4, 2)], 3, 4, torch.float32)),
        name(KVPool(2 * shapes, 3, 4, torch.float32)),
        name(fp8_pool(1.0)),
        name(fp8_pool(2.0)),
        *(name(KVPool(shapes, 3, 4, torch.float32, recurrent_layers=layers)) for layers in RECURRENT_LAYERS),
    ]
    assert len(set(names)) == len(names)
    assert name(KVPool(shapes, 7, 4, torch.float32)) == names[0]  # a larger pool holds the same blocks


def _change_a_weight(model: transformers.PreTrainedModel) -> None:
    with torch.no_grad():
        next(model.parameters()).view(-1)[-1] += 1e-3


def _change_rope(model: transformers.PreTrainedModel) -> None:
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 123.0}


@pytest.mark.parametrize("change", [_change_a_weight, _change_rope])
def test_a_weight_and_a_setting_of_a_model_change_its_name(
    change: Callable[[transformers.PreTrainedModel], None],
) -> None:
    before = model_fingerprint(build_shallow("llama"), None)
    model = build_shallow("llama")
    change(model)
    assert model_fingerprint(model, None) != before
    assert model_fingerprint(build_shallow("llama"), None) == before
    assert model_fingerprint(build_shallow("llama"), "int8") != before


def test_a_model_that_is_changed_in_place_is_another_one() -> None:
    """The first name used to be kept: blocks of the new weights were stored under it, where the old weights found them."""
    model = build_shallow("llama")
    before = model_fingerprint(model, None)
    _change_a_weight(model)
    assert model_fingerprint(model, None) != before


def test_weights_of_a_class_of_their_own_are_not_named() -> None:
    """As quantisation packages make them: the model could not be loaded on a CPU, and torch's error did not say why."""
    model = build_shallow("llama")
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = torch.nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach()), requires_grad=False)
    message = r"^model: its weights cannot be named: model\.layers\.0\.self_attn\.q_proj\.weight: .* got a TwoTensor$"
    with pytest.raises(ValueError, match=message):
        model_fingerprint(model, None)


def test_what_was_repacked_has_its_name_until_the_rest_of_it_is_changed(tmp_path: Path) -> None:
    model = build_shallow("llama")
    options: dict[str, Any] = {"block_size": 4, "num_blocks": 80, "disk_cache": tmp_path}
    with LLM(model, **options) as llm:
        named = llm.engine.loaded.fingerprint
    with LLM(model, **options) as llm:
        assert llm.engine.loaded.fingerprint == named == model_fingerprint(build_shallow("llama"), None)
    _change_a_weight(model)
    with pytest.raises(ValueError, match="model: its weights cannot be named, because they were changed after an LLM"):
        LLM(model, **options)
    LLM(model, block_size=4, num_blocks=80)  # which needs no name
    build_shallow("llama").save_pretrained(tmp_path / "folder")
    untiered = LLM(tmp_path / "folder", block_size=4, num_blocks=80).engine.loaded.model
    with pytest.raises(
        ValueError, match="model: its weights cannot be named, because an LLM without tiers has repacked"
    ):
        LLM(untiered, **options)
