"""An engine whose cache is float8: more tokens fit, sharing changes no token, and answers stay close to the model's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
import transformers
from support.model_zoo import build_supported
from support.prompt_sets import GREEDY, shared_prefix_prompts, tokens_of
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from radixkv import LLM, BeamSearchParams, SamplingParams
from radixkv.config import EngineConfig, KvCacheDtype
from radixkv.engine.engine import Engine
from radixkv.model.graphs import compiled_layers
from radixkv.model.loader import load_model


@pytest.fixture
def float64() -> Iterator[None]:
    """Batches of other shapes differ by 1e-16 in float64, too little to change which float8 number a value rounds to."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def tiny(name: str = "llama", dtype: torch.dtype = torch.float64, **options: Any) -> LLM:
    options = {"block_size": 4, "num_blocks": 400, "kv_cache_dtype": "fp8", **options}
    return LLM(build_supported(name).to(dtype), **options)


def unshared_answers(name: str, dtype: torch.dtype, params: SamplingParams = GREEDY) -> list[list[int]]:
    """Answers of an engine without prefix caching, one request at a time."""
    llm = tiny(name, dtype, enable_prefix_caching=False, max_num_seqs=1)
    return tokens_of(llm, shared_prefix_prompts(1, 12), params)


@pytest.fixture(scope="module")
def float32_answers() -> list[list[int]]:
    """Answers in float32, where a value may round to another float8 number."""
    return tokens_of(tiny(dtype=torch.float32), shared_prefix_prompts(1, 12))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", "sizes"), [("llama", [(1, 16), (3, 7), (16, 64)]), ("gemma4_text", [(3, 7)])])
def test_cached_and_uncached_runs_give_the_same_tokens(name: str, sizes: list[tuple[int, int]]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    expected = unshared_answers(name, torch.float64, params)
    for block_size, chunk in sizes:
        llm = tiny(name, block_size=block_size, num_blocks=-(-300 // block_size), max_num_batched_tokens=chunk)
        for _ in range(2):
            assert tokens_of(llm, shared_prefix_prompts(1, 12), params) == expected
        assert llm.engine.cache.stats.reused_tokens > 12 * 30


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_windows_sinks_and_unequal_heads(name: str) -> None:
    """In float32, where a value may round to another float8 number; without float8 most of the twelve answers differ."""
    expected = unshared_answers(name, torch.float32)
    llm = tiny(name, torch.float32, max_num_batched_tokens=16)
    for _ in range(2):
        answers = tokens_of(llm, shared_prefix_prompts(1, 12))
        assert sum(answer == truth for answer, truth in zip(answers, expected, strict=True)) >= 10
    unquantised = tokens_of(tiny(name, torch.float32, kv_cache_dtype="auto"), shared_prefix_prompts(1, 12))
    assert sum(answer == truth for answer, truth in zip(unquantised, expected, strict=True)) < 6


def test_compiled_layers_give_the_same_tokens(
    float32_answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_layers, "_BACKEND", "aot_eager")
    answers = tokens_of(tiny(dtype=torch.float32, enable_torch_compile=True), shared_prefix_prompts(1, 12))
    assert sum(answer == truth for answer, truth in zip(answers, float32_answers, strict=True)) >= 10


@pytest.mark.usefixtures("float64")
def test_samples_and_beams_fork_with_copy_on_write() -> None:
    prompt = {"prompt_token_ids": list(range(3, 45))}
    params = SamplingParams(n=6, temperature=1.5, seed=1, max_tokens=12, ignore_eos=True)
    beams = BeamSearchParams(3, 12, ignore_eos=True)
    llm, uncached = tiny(), tiny(enable_prefix_caching=False, block_size=1)
    assert tokens_of(llm, [prompt], params) == tokens_of(uncached, [prompt], params)
    assert llm.engine.cache.stats.copied_blocks >= 5
    found, truth = (engine.beam_search(prompt, beams)[0].sequences for engine in (llm, uncached))
    assert [beam.tokens for beam in found] == [beam.tokens for beam in truth]


@pytest.mark.usefixtures("float64")
def test_probabilities_equal_transformers_with_rounded_keys_and_values() -> None:
    llm = tiny(max_num_batched_tokens=16)
    scales = llm.engine.pool.scales

    def attend_rounded(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        rounded = []
        for tensor, scale in zip((key, value), scales(module.layer_idx), strict=True):
            assert scale is not None
            per_head = scale[None, :, None, None]
            rounded.append((tensor / per_head).to(torch.float8_e4m3fn).double() * per_head)
        return sdpa_attention_forward(module, query, *rounded, mask, is_causal=True, **options)

    transformers.AttentionInterface.register("rounded", attend_rounded)
    model = build_supported("llama").double()
    model.set_attn_implementation("rounded")
    prompt = shared_prefix_prompts(1, 1)[0]["prompt_token_ids"]
    exact, _ = logprobs(llm, prompt)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    torch.testing.assert_close(exact, logits.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "times"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_float8_blocks_take_a_byte_per_element(dtype: torch.dtype, times: int) -> None:
    # A block of the tiny model takes 6,144 bytes in float32.
    plain, small = (
        LLM(build_supported("llama").to(dtype), kv_cache_memory_bytes="120KiB", kv_cache_dtype=name).engine
        for name in get_args(KvCacheDtype)
    )
    assert small.cache.num_blocks == small.pool.num_blocks == times * plain.pool.num_blocks
    assert small.pool.nbytes == plain.pool.nbytes == 6144 * 20
    assert small.pool.nbytes == sum(tensor.nbytes for tensor in (*small.pool.keys, *small.pool.values))


def scale_heads(model: torch.nn.Module, keys: float, values: float) -> None:
    """Scale keys and values up by factors, and the weights that read them down: the model is equivalent."""
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            for projection, factor in (
                (attention.k_proj, keys),
                (attention.q_proj, 1 / keys),
                (attention.v_proj, values),
                (attention.o_proj, 1 / values),
            ):
                projection.weight.mul_(factor)


@pytest.mark.parametrize(("keys", "values"), [(2.0**12, 2.0**-12), (2.0**-20, 2.0**15)])
def test_keys_and_values_of_any_size_keep_their_precision(
    keys: float, values: float, float32_answers: list[list[int]]
) -> None:
    """Powers of two change no rounding, so that answers are the same if the scales follow exactly."""
    model = build_supported("llama")
    scale_heads(model, keys, values)
    llm = LLM(model, block_size=4, num_blocks=400, kv_cache_dtype="fp8")
    assert tokens_of(llm, shared_prefix_prompts(1, 12)) == float32_answers


def test_an_unknown_type_is_refused_before_anything_is_changed() -> None:
    loaded = load_model(build_supported("llama"))
    before = loaded.model.config._attn_implementation
    with pytest.raises(ValueError, match="kv_cache_dtype: expected one of auto, fp8, got 'int4'"):
        Engine(loaded, EngineConfig(num_blocks=10, kv_cache_dtype="int4"))
    assert loaded.model.config._attn_implementation == before


def test_a_gpu_without_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "RTX 3090")
    loaded = dataclasses.replace(load_model(build_supported("llama")), device=torch.device("cuda"))
    with pytest.raises(ValueError, match=r"'fp8' needs a GPU of compute capability 8\.9 .* got 8\.6 \(RTX 3090\)"):
        Engine(loaded, EngineConfig(num_blocks=10, kv_cache_dtype="fp8"))


def test_keys_that_are_not_finite_are_refused() -> None:
    model = build_supported("llama")
    scale_heads(model, float("inf"), 1.0)
    with pytest.raises(ValueError, match="keys of attention layer 0 are not finite"):
        LLM(model, num_blocks=10, kv_cache_dtype="fp8")


TEXT = (
    "The old library stood at the end of the street, where the trams turned round. Every morning at eight the porter "
    "opened the heavy doors, and a small crowd of students, pensioners and people who simply had nowhere warm to go came "
    "in from the rain. Nobody knew exactly how many books it held. The catalogue had been begun in 1871 by a man who "
    "wished to describe every volume in verse, and although his successors had given up the rhymes, they had kept his "
    "numbering, which followed no system that anybody could explain.\n\n"
    "def total(prices, discount=0.1):\n    return sum(price * (1 - discount) for price in prices)\n"
)
QUESTIONS = ["What is the capital of France?", "Write a short poem about the sea.", "List five fruits."]


def logprobs(llm: LLM, token_ids: list[int]) -> tuple[torch.Tensor, list[int]]:
    """The log-probability of every token but the first, and the likeliest token at each position."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    prompt_logprobs = llm.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)[0].prompt_logprobs
    assert prompt_logprobs is not None
    steps = [step for step in prompt_logprobs[1:] if step]
    own = [step[token].logprob for step, token in zip(steps, token_ids[1:], strict=True)]
    return torch.tensor(own), [max(step, key=lambda token: step[token].logprob) for step in steps]


def test_the_real_models_probabilities_stay_close(default_llm: LLM) -> None:
    """Over a text and the model's own answers; measured over longer ones: 0.08 and 0.05, 94 % the same likeliest token."""
    rounded = LLM(dtype="float32", block_size=16, num_blocks=100, kv_cache_dtype="fp8")
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    answers = default_llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), use_tqdm=False)
    texts = [default_llm.get_tokenizer()(TEXT)["input_ids"]]
    texts += [[*answer.prompt_token_ids, *answer.outputs[0].token_ids] for answer in answers]
    difference, same = [], []
    for text in texts:
        (exact, likeliest), (quantised, chosen) = logprobs(default_llm, text), logprobs(rounded, text)
        difference.append((quantised - exact).abs())
        same += [a == b for a, b in zip(likeliest, chosen, strict=True)]
    assert 0.001 < torch.cat(difference).mean() < 0.12
    assert sum(same) > 0.88 * len(same)
