"""The engine on a GPU: greedy tokens of the CPU backend in float32, and CUDA graphs that change nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.model_zoo import VOCAB_SIZE, build_supported
from support.tiered_llm import evict_all

from radixkv import LLM, BeamSearchParams, SamplingParams
from radixkv.memory.upload import to_device
from radixkv.sampling.logit_changes import LogitChanges
from radixkv.sampling.sampler import InFlightTokens, SamplingState
from radixkv.scheduling.batch import Batch

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def prompts() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    stem, *tails = (torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (150, 5, 20, 1, 90))
    return [{"prompt_token_ids": ids} for ids in (*(stem + tail for tail in tails), list(stem), tails[3])]


@pytest.fixture
def exact_float32() -> Iterator[None]:
    """Products in float32 that are not rounded to TF32. Not by monkeypatch: it would delete what is no real attribute."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2", "deepseek_v3", "gemma4_text", "qwen3_moe"])
def test_greedy_tokens_equal_the_cpu_backends_in_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[torch.cuda.CUDAGraph] = []
    replay = torch.cuda.CUDAGraph.replay

    def noted(graph: torch.cuda.CUDAGraph) -> None:
        replayed.append(graph)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", noted)
    model = build_supported(name)
    on_gpu = copy.deepcopy(model).cuda()
    options = {"block_size": 16, "num_blocks": 200, "max_num_batched_tokens": 64, "enable_torch_compile": False}
    truth = LLM(model, **options).generate(prompts(), GREEDY, use_tqdm=False)
    for eager in (True, False):
        llm = LLM(copy.deepcopy(on_gpu), enforce_eager=eager, **options)
        for _ in range(2):  # the second time everything is cached
            outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == [t.outputs[0].token_ids for t in truth]
            llm.engine.cache.check()
        if not eager and name in ("llama", "gemma2", "gemma4_text"):
            assert replayed  # the others ask for values in float32, and report that


@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_compiled_layers_in_cuda_graphs_give_the_tokens_of_eager_ones(name: str) -> None:
    on_gpu = build_supported(name).cuda()
    options = {"block_size": 16, "num_blocks": 200, "max_num_batched_tokens": 64}
    uncompiled = LLM(copy.deepcopy(on_gpu), enforce_eager=True, enable_torch_compile=False, **options)
    truth = uncompiled.generate(prompts(), GREEDY, use_tqdm=False)
    for eager in (True, False):
        llm = LLM(copy.deepcopy(on_gpu), enforce_eager=eager, enable_torch_compile=True, **options)
        for _ in range(2):  # the second time everything is cached
            outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == [t.outputs[0].token_ids for t in truth]
            llm.engine.cache.check()


def test_the_pool_takes_what_memory_is_left() -> None:
    llm = LLM(build_supported("llama").cuda(), gpu_memory_utilization=0.5, enable_torch_compile=False)
    free, total = torch.cuda.mem_get_info()
    assert 0.3 * total < llm.engine.pool.nbytes < 0.5 * total
    assert total - free < 0.52 * total  # with its graphs, which were counted


@pytest.mark.usefixtures("exact_float32", "loads_are_worth_it")
def test_blocks_that_went_down_to_the_host_come_up_again_as_they_were() -> None:
    """Read on the engine's stream, written on other streams while it computes, through pinned memory both ways."""
    options = {"block_size": 16, "num_blocks": 60, "max_num_batched_tokens": 64, "enable_torch_compile": False}
    llm = LLM(build_supported("llama").cuda(), host_cache_size="8MiB", cache_write_policy="write-back", **options)
    truth = llm.generate(prompts(), GREEDY, use_tqdm=False)
    for _ in range(3):
        evict_all(llm)
        outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == [t.outputs[0].token_ids for t in truth]
        assert sum(o.metrics.loaded_tokens.get("host", 0) for o in outputs) >= 144
        llm.engine.cache.check()


@pytest.fixture(scope="module")
def on_both() -> tuple[LLM, LLM]:
    """The same model on a CPU and on a GPU."""
    model = build_supported("llama")
    on_gpu = copy.deepcopy(model).cuda()
    return LLM(model, num_blocks=200), LLM(on_gpu, num_blocks=200, enable_torch_compile=False)


@pytest.mark.parametrize(
    "options",
    [
        {"n": 4, "temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
        {"temperature": 0.0, "logit_bias": {5: 3.0, 8: -100.0}},
        {"temperature": 0.0, "min_tokens": 8, "stop_token_ids": list(range(0, VOCAB_SIZE, 3))},
        {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    ],
    ids=str,
)
def test_choices_do_not_depend_on_the_device(on_both: tuple[LLM, LLM], options: dict[str, Any]) -> None:
    """Random numbers are the same everywhere; in float32, two logits are seldom close enough to change a choice."""
    params = SamplingParams(seed=3, max_tokens=20, ignore_eos=True, **options)
    answers = [[s.token_ids for s in llm.generate(prompts()[0], params, use_tqdm=False)[0].outputs] for llm in on_both]
    assert answers[0] == answers[1]


def test_launching_a_decoding_step_waits_for_nothing(on_both: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, drawn and truncated rows; over block borders, which bring new blocks, and with a new plan when one ends."""
    llm = on_both[1]
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}]
    params = [
        SamplingParams(seed=3, max_tokens=n, ignore_eos=True, **kind)
        for n, kind in zip((40, 40, 60), kinds, strict=True)
    ]
    llm.generate(prompts()[:3], params, use_tqdm=False)  # all graphs are there from now on
    execute, num_watched = llm.engine._executor.execute, 0

    def watched(batch: Batch, in_flight: Batch | None) -> None:
        nonlocal num_watched
        if any(chunk.num_tokens > 1 for chunk in batch.chunks):
            return execute(batch, in_flight)
        num_watched += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return execute(batch, in_flight)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(llm.engine._executor, "execute", watched)
    llm.generate(prompts()[:3], params, use_tqdm=False)
    assert num_watched > 50


def test_what_was_launched_later_is_waited_for_neither_by_tokens_nor_by_uploads() -> None:
    logits = torch.randn(4, 1000, device="cuda")
    each_params = [SamplingParams(temperature=t) for t in (0.0, 0.0, 1.0, 1.0)]
    states = [SamplingState(params, 1, 0, [5], LogitChanges(params)) for params in each_params]
    for number in range(2):  # at first, libraries are loaded
        sampled = InFlightTokens(logits, states, [0] * 4)
        if number == 1:
            torch.cuda._sleep(2_000_000_000)  # cycles: a second
        tokens = sampled.fetch()
        there = to_device(torch.arange(100_000), logits.device)
        assert number == 0 or not torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        assert tokens[:2] == logits.argmax(-1)[:2].tolist()
        assert there.cpu().equal(torch.arange(100_000))


def test_greedy_and_sampled_requests_in_one_batch(on_both: tuple[LLM, LLM]) -> None:
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}]
    params = [SamplingParams(seed=3, max_tokens=20, ignore_eos=True, **kind) for kind in kinds]
    answers = [[o.outputs[0].token_ids for o in llm.generate(prompts()[:3], params, use_tqdm=False)] for llm in on_both]
    assert answers[0] == answers[1]


def test_beams_do_not_depend_on_the_device(on_both: tuple[LLM, LLM]) -> None:
    params = BeamSearchParams(3, 10, ignore_eos=True)
    answers = [[s.tokens for s in llm.beam_search(prompts()[0], params)[0].sequences] for llm in on_both]
    assert answers[0] == answers[1]


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no float8")
@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3"])
def test_fp8_tokens_are_nearly_always_the_cpu_backends(name: str) -> None:
    """A number may round to the neighbouring float8 number, so not every answer needs to be the same."""
    model = build_supported(name)
    on_gpu = copy.deepcopy(model).cuda()
    options: dict[str, Any] = {
        "block_size": 16,
        "num_blocks": 200,
        "max_num_batched_tokens": 64,
        "kv_cache_dtype": "fp8",
        "enable_torch_compile": False,
    }
    expected = LLM(model, **options)
    truth = expected.generate(prompts(), GREEDY, use_tqdm=False)
    for eager in (True, False):
        llm = LLM(copy.deepcopy(on_gpu), enforce_eager=eager, **options)
        for layer in range(len(llm.engine.pool.layers)):
            for ours, theirs in zip(llm.engine.pool.scales(layer), expected.engine.pool.scales(layer), strict=True):
                assert ours is not None
                assert theirs is not None
                assert torch.equal(ours.cpu(), theirs)
        for _ in range(2):  # the second time everything is cached
            outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
            same = [
                o.outputs[0].token_ids[:10] == t.outputs[0].token_ids[:10] for o, t in zip(outputs, truth, strict=True)
            ]
            assert sum(same) >= len(same) - 1
            llm.engine.cache.check()
