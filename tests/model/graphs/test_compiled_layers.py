"""Compiled decoder layers: the same tokens, few compilations, and a clear error where compilation fails."""

from __future__ import annotations

import dataclasses
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_zoo import build, build_shallow, build_supported
from support.prompt_sets import stem_and_tails
from torch._dynamo.utils import counters

from radixkv import LLM, SamplingParams
from radixkv.config import DEVICE_DEFAULTS
from radixkv.errors import UnsupportedModelError
from radixkv.model.graphs import compiled_layers
from radixkv.model.loader import load_model
from radixkv.model.replacement.merged_linear import merge_linears
from radixkv.model.runner import ModelRunner

OPTIONS: dict[str, Any] = {"block_size": 4, "num_blocks": 200, "max_num_batched_tokens": 16}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are traced as for any backend, and the graphs are run as they are: no code is generated."""
    monkeypatch.setattr(compiled_layers, "_BACKEND", "eager")


def num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def answers(llm: LLM) -> list[list[int]]:
    """Greedy tokens of prompts that share a prefix: as one batch, one alone, and from the cache."""
    inputs = [{"prompt_token_ids": prompt} for prompt in stem_and_tails()]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    outputs = [*llm.generate(inputs, params, use_tqdm=False), *llm.generate(inputs[0], params, use_tqdm=False)]
    llm.engine.cache.check()
    return [output.outputs[0].token_ids for output in outputs]


# Windows and capped scores; sinks; norms of heads, and experts; latent attention; layers that share keys, with more variants
# than torch keeps; windows by the mask alone.
# aot_eager also rewrites what is written in place, half of the time, as code generation does first.
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("gpt_oss", "aot_eager"),
        *((name, "eager") for name in ("gemma2", "qwen3_moe", "deepseek_v3", "gemma4_text", "qwen2_moe")),
    ],
)
def test_compiled_layers_give_the_same_tokens(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers, "_BACKEND", backend)
    expected = answers(LLM(build_shallow(name), **OPTIONS))
    before = num_graphs()
    llm = LLM(build_shallow(name), enable_torch_compile=True, **OPTIONS)
    assert num_graphs() > before
    assert answers(llm) == expected


def test_generated_code_gives_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(partial(sys.setrecursionlimit, sys.getrecursionlimit()))  # generating code raises it
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # or an earlier run's code is tested
    # 154 MB for each environment, which stayed in /tmp.
    monkeypatch.setattr("torch._inductor.codecache._HEADER_DIR", str(tmp_path / "headers"))
    monkeypatch.setattr("torch._inductor.codecache._HEADER_LOCK_DIR", str(tmp_path / "headers" / "locks"))
    expected = answers(LLM(build_shallow("llama"), **OPTIONS))
    assert answers(LLM(build_shallow("llama"), enable_torch_compile=True, **OPTIONS)) == expected


@pytest.mark.usefixtures("traced")
def test_a_layer_with_a_graph_break_is_compiled_as_several_graphs() -> None:
    """Experts that read a value on the host break the graph like this hook."""
    expected = answers(LLM(build("llama", {"num_hidden_layers": 1}), **OPTIONS))
    model = build("llama", {"num_hidden_layers": 1})
    values = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: values.append(args[0].sum().item()))
    before = num_graphs()
    llm = LLM(model, enable_torch_compile=True, **OPTIONS)
    assert num_graphs() - before > 2
    values.clear()
    assert answers(llm) == expected
    assert values


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("ministral", {"layer_types": ["sliding_attention", "full_attention"] * 6, "sliding_window": 12}),
    ],
)
@pytest.mark.usefixtures("traced")
def test_twelve_layers_are_compiled_once_for_one_token_and_once_for_more(name: str, options: dict[str, Any]) -> None:
    """More layers than the eight variants that torch would keep, and batches of many sizes after the start.

    Layers with a sliding window used to be compiled apart.
    """
    before = num_graphs()
    llm = LLM(
        build(name, {"num_hidden_layers": 12, **options}),
        enable_torch_compile=True,
        block_size=4,
        num_blocks=400,
        max_num_seqs=20,
    )
    assert num_graphs() - before == 2
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    for size in (1, 2, 3, 5, 8, 9, 17, 20):
        prompts = [{"prompt_token_ids": list(range(3 + i, 3 + i + 7 * size))} for i in range(size)]
        llm.generate(prompts, params, use_tqdm=False)
    assert num_graphs() - before == 2


@pytest.mark.usefixtures("traced")
def test_layers_whose_linears_are_merged_stay_one_graph_and_share_its_code() -> None:
    """Though the first linear of a group computes what the others return."""
    model = build("llama", {"num_hidden_layers": 12})
    loaded = dataclasses.replace(load_model(build_supported("llama"), native=False), model=model)
    tokens = torch.arange(3, 40).unsqueeze(0)
    with torch.inference_mode():
        expected = model(input_ids=tokens, use_cache=False).logits
        assert merge_linears(model, lambda: model(input_ids=tokens, use_cache=False)) == 12 * 5
        before = num_graphs()
        ModelRunner(loaded, enable_torch_compile=True)
        assert num_graphs() - before == 2
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(model(input_ids=tokens, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("traced")
@torch._dynamo.config.patch(recompile_limit=3)
def test_models_do_not_share_torchs_limit_of_compilations() -> None:
    before = num_graphs()
    for heads in (1, 2):
        sizes = {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 8}
        LLM(build("llama", {**sizes, "num_hidden_layers": 1}), enable_torch_compile=True, **OPTIONS)
    assert num_graphs() - before == 4


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        raise NotImplementedError("no such processor")

    monkeypatch.setattr(compiled_layers, "_BACKEND", backend)


@pytest.mark.usefixtures("no_compiler")
def test_by_default_layers_that_cannot_be_compiled_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = answers(LLM(build_supported("llama"), **OPTIONS))
    monkeypatch.setattr("radixkv.config.DEVICE_DEFAULTS", {"cpu": DEVICE_DEFAULTS["cuda"]})
    model = build_supported("llama")
    with caplog.at_level(logging.WARNING):
        llm = LLM(model, **OPTIONS)
    assert [record.getMessage() for record in caplog.records if record.name == "radixkv.model.runner"] == [
        "LlamaForCausalLM: its layers run as they are: torch.compile cannot compile them "
        "(backend='backend' raised: NotImplementedError: no such processor)"
    ]
    assert not any(layer._compiled_call_impl for layer in compiled_layers.decoder_layers(model))
    assert answers(llm) == expected


@pytest.mark.usefixtures("no_compiler")
def test_layers_that_cannot_be_compiled_are_refused_and_left_uncompiled() -> None:
    model = build_supported("llama")
    with pytest.raises(UnsupportedModelError, match=r"cannot compile its layers \(.*no such processor.*=False"):
        LLM(model, enable_torch_compile=True, **OPTIONS)
    assert not any(layer._compiled_call_impl for layer in compiled_layers.decoder_layers(model))


@pytest.mark.usefixtures("traced")
def test_a_model_that_was_compiled_runs_uncompiled_in_the_next_runner() -> None:
    loaded = load_model(build_supported("llama"), native=False)
    ModelRunner(loaded, enable_torch_compile=True)
    layers = compiled_layers.decoder_layers(loaded.model)
    assert len(layers) == 3
    assert all(layer._compiled_call_impl for layer in layers)
    ModelRunner(loaded)
    assert not any(layer._compiled_call_impl for layer in layers)
