"""Every supported architecture gives transformers' tokens, however the work is cut up and shared."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.model_zoo import (
    MULTIMODAL,
    RECURRENT,
    RECURRENT_MULTIMODAL,
    REFUSED,
    SUPPORTED,
    VARIANTS,
    WIDE,
    WIDE_EXPERTS,
    build,
    build_multimodal,
    build_supported,
)
from support.prompt_sets import outputs_that_equal_transformers, stem_and_tails, tokens_of, tokens_of_transformers
from transformers.models.llama import modeling_llama

from radixkv import LLM, SamplingParams
from radixkv.errors import UnsupportedModelError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_tokens_equal_transformers_generate(name: str) -> None:
    assert_tokens_equal_transformers(partial(build_supported, name))


@pytest.mark.parametrize("name", sorted(MULTIMODAL))
def test_tokens_equal_where_a_model_also_sees_images_or_hears(name: str) -> None:
    assert_tokens_equal_transformers(partial(build_multimodal, name))


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_tokens_equal_with_other_configurations(name: str) -> None:
    assert_tokens_equal_transformers(partial(build, name, VARIANTS[name]))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_of_sizes_that_native_code_takes(name: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    assert_tokens_equal_transformers(partial(build, name, SUPPORTED[name] | WIDE_EXPERTS | sizes))


def test_pages_say_how_many_architectures_are_tested() -> None:
    root = Path(__file__).parents[2]
    for page in ("CHANGELOG.md", "CONTRIBUTING.md", "docs/limits.md", "docs/architecture/index.md"):
        said = re.findall(r"(\d+) architectures", (root / page).read_text())
        tested = (SUPPORTED, MULTIMODAL, RECURRENT, RECURRENT_MULTIMODAL)
        assert said == [str(sum(map(len, tested)))], page


def assert_tokens_equal_transformers(build_it: Callable[[], torch.nn.Module]) -> None:
    outputs = outputs_that_equal_transformers(build_it)
    assert all(output.num_cached_tokens == len(output.prompt_token_ids) - 1 for output in outputs)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_models_that_blocks_cannot_serve_are_refused(name: str) -> None:
    model = build(name, REFUSED[name])
    with pytest.raises(
        UnsupportedModelError,
        match=rf"^{type(model).__name__}: .*(replaced|layers of type|later tokens|mix tokens|of their own|called twice|"
        r"something else|by their row|counts positions|recurrent)",
    ):
        LLM(model)


@pytest.mark.parametrize("sizes", [{}, WIDE], ids=["as torch computes them", "as native code does"])
def test_layers_that_attend_to_later_tokens_are_refused_whatever_stands_in_for_them(sizes: dict[str, Any]) -> None:
    model = build("gemma3_text", {**SUPPORTED["gemma3_text"], **sizes, "use_bidirectional_attention": True})
    with pytest.raises(UnsupportedModelError, match=r"^Gemma3ForCausalLM: its layers attend to later tokens, too$"):
        LLM(model)


@pytest.mark.parametrize("sizes", [{}, WIDE], ids=["as torch computes them", "as native code does"])
def test_what_layers_add_to_attention_is_refused_whatever_stands_in_for_them(
    sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention was computed without it: neither a model's own function of a mask nor a bias was noticed."""
    combined = partial(modeling_llama.create_causal_mask, or_mask_function=lambda *_: torch.tensor(True))
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "create_causal_mask", combined)
        with pytest.raises(UnsupportedModelError, match=r"^LlamaForCausalLM: its layers add .*: a mask of their own$"):
            LLM(build("llama", sizes))
    attend = modeling_llama.LlamaAttention.forward
    for added, reason in (
        ({"position_bias": torch.zeros(1, 1, 1, 1)}, "add to attention what blocks do not hold: position_bias"),
        ({"is_causal": False}, "attend to later tokens, too"),
    ):
        monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", partialmethod(attend, **added))
        with pytest.raises(UnsupportedModelError, match=f"^LlamaForCausalLM: its layers {reason}$"):
            LLM(build("llama", sizes))


def test_a_mask_that_a_model_computes_with_is_none_of_a_window() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^DogeForCausalLM: .* a mask of their own$"):
        LLM(build("doge", {"sliding_window": 12}))


@pytest.mark.parametrize("sizes", [{}, WIDE], ids=["as torch computes them", "as native code does"])
def test_a_window_that_the_model_masks_nowhere_is_refused(sizes: dict[str, Any]) -> None:
    """olmoe hands it to its attention function and makes masks without it: flash attention heeds it, others do not."""
    with pytest.raises(UnsupportedModelError, match=r"^OlmoeForCausalLM: expected no sliding_window, got 12: "):
        LLM(build("olmoe", {**SUPPORTED["olmoe"], **sizes, "sliding_window": 12}))


def test_what_the_refusals_of_llama4_advise_changes_no_token() -> None:
    sizes = {**VARIANTS["llama4_text+full"], "attention_chunk_size": 96, "floor_scale": 96}
    chunked = {**sizes, "layer_types": ["chunked_attention", "full_attention", "chunked_attention"]}
    with pytest.raises(
        UnsupportedModelError,
        match=r"of up to 96 tokens, .* layer_types has 'full_attention' for each layer of this type",
    ):
        LLM(build("llama4_text", chunked))
    with pytest.raises(UnsupportedModelError, match=r"false in its config.json changes nothing in .* up to 96 tokens"):
        LLM(build("llama4_text", {**sizes, "attn_temperature_tuning": True}))
    as_it_was = build("llama4_text", {**chunked, "attn_temperature_tuning": True})
    expected = tokens_of_transformers(as_it_was, stem_and_tails(), 8)
    inputs = [{"prompt_token_ids": prompt} for prompt in stem_and_tails()]
    assert tokens_of(LLM(build("llama4_text", sizes), num_blocks=50), inputs, GREEDY) == expected


def test_a_model_that_heeds_no_positions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said to mix tokens elsewhere than in attention."""
    forward = modeling_llama.LlamaForCausalLM.forward

    def count(
        self: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: Any = 0, **options: Any
    ) -> Any:
        return forward(self, input_ids, logits_to_keep=logits_to_keep, **options)

    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", count)
    with pytest.raises(UnsupportedModelError, match=r"^LlamaForCausalLM: it counts positions itself, whatever"):
        LLM(build_supported("llama"))


def test_a_model_without_positions_that_mixes_tokens_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said to count positions itself, for it computes the same whatever position_ids say."""
    compute = modeling_llama.LlamaMLP.forward

    def mix(self: Any, x: torch.Tensor) -> Any:
        return compute(self, x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", mix)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda query, key, *_, **__: (query, key))
    with pytest.raises(UnsupportedModelError, match=r"^LlamaForCausalLM: its layers mix tokens elsewhere"):
        LLM(build_supported("llama"))


def test_positions_are_probed_without_the_padding_token_of_the_part_that_reads_text() -> None:
    """Its own position is the number of padding, 0 here, and the tokens after it then had those that an engine gives."""
    text = {
        "vocab_size": 200, "embed_dim": 32, "layers": 2, "ffn_dim": 48, "attention_heads": 4, "max_position_embeddings": 512,
        "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("kosmos-2.5", text_config=text, vision_config=vision)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with pytest.raises(UnsupportedModelError, match="it counts positions from another number than 0"):
        LLM(model)


def test_parts_that_no_text_calls_may_attend_to_what_they_like() -> None:
    """Only what text calls counts: Gemma 4 used to be refused because of its vision tower."""

    def build_with_vision() -> torch.nn.Module:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        vision = {**sizes, "num_key_value_heads": 4, "head_dim": 8, "global_head_dim": 8, "position_embedding_size": 64}
        text = build_supported("gemma4_text").config
        config = transformers.AutoConfig.for_model("gemma4", text_config=text, vision_config=vision, audio_config=None)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()

    assert_tokens_equal_transformers(build_with_vision)


def test_a_model_that_computes_logits_of_all_tokens_though_told_which_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = modeling_llama.LlamaForCausalLM.forward

    def of_all_tokens(
        self: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: object = 0, **options: Any
    ) -> Any:
        return forward(self, input_ids, position_ids=position_ids, **options)

    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", of_all_tokens)
    with pytest.raises(
        UnsupportedModelError, match=r"^LlamaForCausalLM: it computes logits of other tokens than those"
    ):
        LLM(build_supported("llama"))


def test_dynamic_rotation_does_not_remember_longer_sequences() -> None:
    """A longer call leaves its rotation in the model: transformers resets it only at the next call of its own."""

    def build_and_call() -> torch.nn.Module:
        model = build("llama", {**VARIANTS["llama+dynamic"], "max_position_embeddings": 80})
        model(input_ids=torch.tensor([[5, 6]]), position_ids=torch.tensor([[0, 200]]))
        return model

    assert_tokens_equal_transformers(build_and_call)


def test_dynamic_rotation_without_a_limit_is_refused() -> None:
    model = build("llama", VARIANTS["llama+dynamic"])
    model.config.max_position_embeddings = 0
    with pytest.raises(
        UnsupportedModelError, match=r"^LlamaForCausalLM: its rotary positions of type 'dynamic' depend"
    ):
        LLM(model)


def test_a_model_that_an_engine_runs_says_so_when_it_is_called_by_itself() -> None:
    model = build_supported("llama")
    tokens = torch.arange(3, 9).unsqueeze(0)
    expected = model(tokens).logits
    _llm = LLM(model, num_blocks=50)
    with pytest.raises(RuntimeError, match=r"^model: it was given to an LLM, which runs it"):
        model(tokens)
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)


def test_an_engine_runs_no_model_whose_attention_was_set_to_another() -> None:
    """Each token of a batch attended to all before it, those of other requests among them."""
    model = build_supported("gpt2")
    llm = LLM(model, num_blocks=50)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in stem_and_tails()]
    expected = tokens_of(llm, prompts, GREEDY)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match=r"^model: expected the attention that its LLM set, got 'sdpa'; "):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    model.set_attn_implementation("radixkv")
    assert tokens_of(llm, prompts, GREEDY) == expected


@pytest.mark.parametrize("name", ["gemma2", "mixtral"])
def test_a_model_that_an_engine_has_prepared_generates_as_before_when_it_is_called_by_itself(name: str) -> None:
    """Layers of native code heeded neither masks nor caches, and of a batch computed the first row alone."""
    model, truth = build_supported(name), build_supported(name)
    before = model.config._attn_implementation  # eager, which transformers has for each model apart, and sdpa
    LLM(model, num_blocks=50)
    model.set_attn_implementation(before)
    tokens = torch.tensor([[0] * 10 + [*range(3, 25)], [*range(40, 72)]])
    options: dict[str, Any] = {"attention_mask": (tokens != 0).long(), "do_sample": False, "max_new_tokens": 8}
    with torch.inference_mode():
        assert model.generate(tokens, **options).tolist() == truth.generate(tokens, **options).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["deepseek_v3", "gemma2", "gpt_oss", "llama"])
def test_half_precision_is_no_further_from_the_truth_than_transformers(name: str, dtype: torch.dtype) -> None:
    """The mean error of log-probabilities against float32; capped scores, sinks and differing head sizes among them."""
    prompt = stem_and_tails()[3]
    exact = true_logprobs(build_supported(name), prompt)
    theirs = (true_logprobs(build_supported(name).to(dtype), prompt) - exact).abs().mean()
    llm = LLM(build_supported(name).to(dtype), block_size=4, num_blocks=200, max_num_batched_tokens=16)
    assert llm.engine.pool.key_rows[0].dtype == dtype
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    given = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].prompt_logprobs
    assert given is not None
    ours = torch.tensor([step[token].logprob for step, token in zip(given[1:], prompt[1:], strict=True) if step])
    assert (ours - exact).abs().mean() <= 1.5 * theirs


@torch.inference_mode()
def true_logprobs(model: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
    """The log-probability that the model itself gives to each token of the prompt but the first."""
    logits = model(torch.tensor([prompt])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
