"""The whole engine over the Triton backend, kernels interpreted: the tokens that transformers gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.model_zoo import VOCAB_SIZE, build_shallow, build_supported

from radixkv import LLM, BeamSearchParams, SamplingParams
from radixkv.attention.triton import launches
from radixkv.model import kv_quantisation
from radixkv.model.graphs import compiled_layers
from radixkv_kernels import reference


def prompts() -> list[list[int]]:
    """Prompts that share a prefix of 21 tokens, one that is just this prefix, and an unrelated one."""
    generator = torch.Generator().manual_seed(1)
    stem, *tails = (torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (21, 5, 1))
    return [stem + tails[0], list(stem), tails[1]]


def make_llm(name: str, backend: str, **options: Any) -> LLM:
    options = {"block_size": 16, "num_blocks": 40, "max_num_batched_tokens": 24, "max_num_seqs": 4, **options}
    return LLM(build_shallow(name), attention_backend=backend, **options)


# Grouped heads; windows and sinks; capped scores; key and value sizes that differ; layers of different heads that share.
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2", "deepseek_v3", "gemma4_text", "phimoe"])
def test_greedy_tokens_equal_the_cpu_backends(name: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts()]
    expected, llm = make_llm(name, "torch"), make_llm(name, "triton")
    for _ in range(2):  # the second time everything is cached
        outputs = llm.generate(inputs, params, use_tqdm=False)
        truth = expected.generate(inputs, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [t.outputs[0].token_ids for t in truth]
        llm.engine.cache.check()
    assert all(output.num_cached_tokens == len(output.prompt_token_ids) - 1 for output in outputs)


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt_oss", marks=pytest.mark.nightly)])
def test_compiled_layers_decode_in_padded_batches_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers, "_BACKEND", "aot_eager")
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts()]
    truth, llm = make_llm(name, "torch"), make_llm(name, "triton", enable_torch_compile=True)
    graphs = llm.engine._runner._graphs
    assert graphs is not None
    assert graphs.num_captured == len(graphs.kinds)  # before the first request
    answers = [
        [output.outputs[0].token_ids for output in each.generate(inputs, params, use_tqdm=False)]
        for each in (truth, llm)
    ]
    assert answers[0] == answers[1]


def test_samples_and_beams_fork_with_copy_on_write() -> None:
    prompt = {"prompt_token_ids": prompts()[0]}
    sampling = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=4, ignore_eos=True)
    beams = BeamSearchParams(3, 4, ignore_eos=True)
    answers = []
    for backend in ("torch", "triton"):
        llm = make_llm("llama", backend)
        (output,) = llm.generate(prompt, sampling, use_tqdm=False)
        (search,) = llm.beam_search(prompt, beams)
        answers.append(([s.token_ids for s in output.outputs], [s.tokens for s in search.sequences]))
        llm.engine.cache.check()
    assert answers[0] == answers[1]


def test_blocks_that_the_kernels_do_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match=r"block_size: expected one of \(16, 32, 64\) .* got 4"):
        LLM(build_supported("llama"), block_size=4, num_blocks=10, attention_backend="triton")


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.nightly), "gpt_oss", "deepseek_v3"])
def test_fp8_tokens_equal_the_cpu_backends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch writing: the interpreter does not round to float8 as a GPU does."""
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts()]
    monkeypatch.setattr(kv_quantisation, "CALIBRATION_TOKENS", 40)
    monkeypatch.setattr(launches, "write_cache", reference.write_cache)
    expected, llm = (make_llm(name, backend, kv_cache_dtype="fp8") for backend in ("torch", "triton"))
    for layer in range(len(llm.engine.pool.layers)):
        for ours, theirs in zip(llm.engine.pool.scales(layer), expected.engine.pool.scales(layer), strict=True):
            assert ours is not None
            assert torch.equal(ours, theirs)
    for _ in range(2):  # the second time everything is cached
        outputs = llm.generate(inputs, params, use_tqdm=False)
        truth = expected.generate(inputs, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [t.outputs[0].token_ids for t in truth]
        llm.engine.cache.check()
    assert all(output.num_cached_tokens == len(output.prompt_token_ids) - 1 for output in outputs)
