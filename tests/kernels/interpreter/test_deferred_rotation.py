"""Models whose rotation is left to the kernel that stores keys, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from support.model_zoo import VOCAB_SIZE, build_longrope, build_shallow
from transformers import PreTrainedModel

from radixkv.attention import AttentionLayer, BatchLimits, QueryBatch
from radixkv.attention.triton import start_check
from radixkv.cache import PrefixCache
from radixkv.memory import KVPool
from radixkv.model.graphs import compiled_layers
from radixkv.model.loader import LoadedModel
from radixkv.model.model_input import HOST_TOKEN, ModelInput
from radixkv.model.positions.longrope import choose_factors
from radixkv.model.replacement.deferred_rotation import DeferredRotation, defer_rotation
from radixkv.model.runner import ModelRunner


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers, "_BACKEND", "aot_eager")


def _loaded(model: PreTrainedModel) -> LoadedModel:
    return LoadedModel(
        tokenizer=None,
        name="tiny",
        max_model_len=64,
        original_max_model_len=64,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset(),
        chat_format=None,
        sampling_defaults={},
        model=model,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def _with_long_factors() -> PreTrainedModel:
    model = build_longrope("llama")
    choose_factors(model, 64)
    return model


# All of each head, also as one compiled layer; norms of heads; a part of each head; rotated and scaled.
@pytest.mark.parametrize(
    ("build_it", "compiled"),
    [
        *((partial(build_shallow, name), False) for name in ("llama", "qwen3", "stablelm")),
        (partial(build_shallow, "llama"), True),
        (_with_long_factors, False),
    ],
)
def test_a_prompt_in_chunks_and_a_decoded_token(build_it: Callable[[], PreTrainedModel], compiled: bool) -> None:
    model = build_it()
    tokens = torch.randint(3, VOCAB_SIZE, (22,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(input_ids=tokens[None], use_cache=False).logits[0]
    assert defer_rotation(model) == model.config.num_hidden_layers
    runner = ModelRunner(_loaded(model), enable_torch_compile=compiled)
    runner.use_pool(KVPool(runner.layer_shapes, 4, 16, torch.float32), "triton", BatchLimits(1, 64), enforce_eager=True)
    assert not any(module.rotate_first for module in model.modules() if isinstance(module, DeferredRotation))
    cache = PrefixCache(4, 16)
    table = cache.open(tokens.numpy())
    cache.reserve(table, len(tokens))
    for start, stop in ((0, 18), (18, 21), (21, 22)):
        new = np.array([stop - start])
        queries = QueryBatch([table], num_context=np.array([start]), num_new=new)
        given = runner.run(ModelInput(tokens[start:stop].numpy(), queries, new, np.array([HOST_TOKEN])))
        torch.testing.assert_close(given, expected[start:stop], rtol=1e-4, atol=1e-4)


def test_the_kernel_is_checked_in_place_of_the_one_that_only_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[AttentionLayer] = []
    model = build_shallow("stablelm")
    defer_rotation(model)
    monkeypatch.setattr(start_check, "check_kernels", lambda layers, *rest: checked.extend(layers))
    runner = ModelRunner(_loaded(model))
    runner.check_kernels(16, torch.float32)
    (first, *_) = (module for module in model.modules() if isinstance(module, DeferredRotation))
    assert 0 < first.rotary_dim < first.head_dim
    assert {layer.rotary_dim for layer in checked} == {first.rotary_dim}
    works = dict(start_check._Problem(checked[0], 16, torch.float32, torch.float32, "cpu", 5000).launches())
    assert "write_cache" not in works
    for result, truth in works["rotate_and_write"]():
        torch.testing.assert_close(result, truth, rtol=1e-5, atol=1e-5)
