"""Models with recurrent layers: a state can be shared, copied, evicted, stored and loaded, but not taken back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from support.model_zoo import RECURRENT, RECURRENT_MULTIMODAL, SUPPORTED, WIDE, build, build_multimodal
from support.prompt_sets import (
    outputs_that_equal_transformers,
    shared_prefix_prompts,
    stem_and_tails,
    tokens_of,
    tokens_of_transformers,
)
from transformers.models.lfm2 import modeling_lfm2

from radixkv import LLM, BeamSearchParams, SamplingParams
from radixkv.attention import NewTokens
from radixkv.cache import Reason
from radixkv.errors import UnsupportedModelError
from radixkv.model.forward_pass import running
from radixkv.model.recurrent import RecurrentStep

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
# A convolution, a gated delta rule, Mamba beside attention in each layer, and an attention layer that several places share.
KINDS = ("lfm2", "qwen3_next", "falcon_h1", "zamba2")


def make(name: str, **options: Any) -> LLM:
    return LLM(build(name, RECURRENT[name]), **{"block_size": 4, "num_blocks": 200, **options})


@pytest.mark.parametrize("name", sorted(RECURRENT))
def test_tokens_equal_transformers_generate(name: str) -> None:
    assert_tokens_equal_transformers(partial(build, name, RECURRENT[name]))


@pytest.mark.parametrize("name", sorted(RECURRENT_MULTIMODAL))
def test_tokens_equal_where_a_model_also_sees_images(name: str) -> None:
    assert_tokens_equal_transformers(partial(build_multimodal, name, RECURRENT_MULTIMODAL[name]))


@pytest.mark.parametrize("name", ["lfm3", "olmo_hybrid"])
def test_tokens_equal_at_sizes_that_native_code_takes(name: str) -> None:
    assert_tokens_equal_transformers(partial(build, name, {**RECURRENT[name], **WIDE}))


def assert_tokens_equal_transformers(build_it: Callable[[], torch.nn.Module]) -> None:
    outputs = outputs_that_equal_transformers(build_it)
    # All whole blocks but the one with the last token, whose logits are needed.
    assert all(output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // 4 * 4 for output in outputs)


@pytest.mark.parametrize("name", KINDS)
def test_answers_are_those_without_a_cache_while_blocks_are_evicted_and_sequences_preempted(name: str) -> None:
    prompts = shared_prefix_prompts(seed=3, count=8, longest=30)
    expected = tokens_of(make(name, enable_prefix_caching=False), prompts)
    llm = make(name, num_blocks=24, max_num_batched_tokens=24)
    assert [tokens_of(llm, prompts) for _ in range(2)] == [expected] * 2
    assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("name", KINDS)
def test_samples_and_beams_go_on_from_the_state_of_their_prompt(name: str) -> None:
    samples = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=9, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=9, ignore_eos=True)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in stem_and_tails()]
    plain, llm = make(name, enable_prefix_caching=False), make(name)
    assert tokens_of(llm, prompts, samples) == tokens_of(plain, prompts, samples)
    ours, again, theirs = (
        [[beam.tokens for beam in output.sequences] for output in engine.beam_search(prompts, beams)]
        for engine in (llm, llm, plain)
    )
    assert ours == again == theirs


@pytest.mark.parametrize("name", KINDS)
def test_a_conversation_goes_on_behind_its_last_answer(name: str) -> None:
    """Its end lies inside a block, whose states are those after all of its tokens."""
    llm, tokens = make(name, block_size=16), [*range(5, 42)]
    for _ in range(3):
        (output,) = llm.generate({"prompt_token_ids": tokens}, GREEDY, use_tqdm=False)
        (plain,) = make(name, enable_prefix_caching=False).generate(
            {"prompt_token_ids": tokens}, GREEDY, use_tqdm=False
        )
        assert output.outputs[0].token_ids == plain.outputs[0].token_ids
        num_computed = len(tokens) + 7  # the last token of the answer was not computed
        tokens = [*tokens, *output.outputs[0].token_ids, 7, 9, 11]
        assert llm.engine.cache.match(tokens) == num_computed


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("together", [False, True])
def test_prompts_that_part_inside_a_block_go_on_from_the_state_there(name: str, together: bool) -> None:
    stem = [*range(5, 55)]
    prompts: list[Any] = [{"prompt_token_ids": [*stem, *range(60 + 9 * i, 66 + 9 * i)]} for i in range(4)]
    expected = tokens_of(make(name, enable_prefix_caching=False), prompts, GREEDY)
    llm = make(name, block_size=32)
    parts = [prompts] if together else [[prompt] for prompt in prompts]
    outputs = [output for part in parts for output in llm.generate(part, GREEDY, use_tqdm=False)]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    # Alone, the second finds out where they part.
    assert [output.num_cached_tokens for output in outputs] == ([0, 50, 50, 50] if together else [0, 32, 50, 50])
    assert tokens_of(llm, prompts, GREEDY) == expected
    assert llm.engine.cache.match([*stem, 99]) == 50


def test_what_differs_inside_a_block_is_computed_from_its_beginning_and_explained() -> None:
    llm = make("lfm2", block_size=16)
    tokens = [*range(5, 45)]
    tokens_of(llm, [{"prompt_token_ids": tokens}], GREEDY)
    other = [*tokens[:38], 99, 98, 97]
    explained = llm.engine.cache.explain(other)
    assert explained.num_reused_tokens == 32
    assert [(part.reason, part.num_tokens) for part in explained.computed] == [
        (Reason.INSIDE_BLOCK, 6),
        (Reason.NEW, 3),
    ]
    (output,) = llm.generate({"prompt_token_ids": other}, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 32


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tier", ["disk_cache", "host_cache_size"])
@pytest.mark.usefixtures("loads_are_worth_it", "look_ups_are_awaited")
def test_states_come_back_from_tiers(name: str, tier: str, tmp_path: Any) -> None:
    options: dict[str, Any] = {tier: tmp_path if tier == "disk_cache" else "8MiB", "num_blocks": 24}
    prompts = shared_prefix_prompts(seed=4, count=6, longest=30)
    expected = tokens_of(make(name, enable_prefix_caching=False), prompts)
    with make(name, cache_write_policy="write-through", **options) as llm:
        assert tokens_of(llm, prompts) == expected
        assert llm.engine.tiers is not None
        assert llm.engine.tiers.flush(600)
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert sum(sum(output.metrics.loaded_tokens.values()) for output in outputs) > 0


def test_a_sequence_never_goes_on_from_another_state() -> None:
    """What keys and values allow, and would be wrong without a sign of it."""
    llm = make("lfm2", block_size=16)
    pool = llm.engine.pool
    tokens = [*range(5, 40)]
    tokens_of(llm, [{"prompt_token_ids": tokens}], GREEDY)
    assert pool.states is not None
    pool.states.num_tokens.sub_(1)
    with pytest.raises(RuntimeError, match=r"block \d+: expected states after 16 of its tokens, got those after 15"):
        llm.generate({"prompt_token_ids": tokens}, GREEDY, use_tqdm=False)


def test_tokens_of_one_sequence_in_many_blocks_and_of_others_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a prompt follow one another; sequences with one new token are computed together."""
    calls: list[tuple[int, int]] = []
    run = RecurrentStep._run_single

    def count(step: RecurrentStep, call: Any, *rest: Any) -> torch.Tensor:
        calls.append((call.num_tokens, len(step._sources)))
        return run(step, call, *rest)

    monkeypatch.setattr(RecurrentStep, "_run_single", count)
    llm = make("lfm2", max_num_batched_tokens=24)
    tokens_of(llm, [{"prompt_token_ids": [*range(3 + i, 43 + i)]} for i in range(4)], GREEDY)
    assert (4, 4) in calls  # all of them decode
    assert any(together < num_tokens for num_tokens, together in calls)  # some decode beside a prompt


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_config": {"method": "tree"}}, r"^speculative_config: expected None .* before a wrong draft"),
        ({"async_scheduling": True}, r"^async_scheduling: expected False .* behind an answer's end"),
    ],
)
def test_what_computes_tokens_that_may_be_dropped_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("lfm2", **options)


def test_rounding_is_no_forgetting() -> None:
    """A model whose states matter more than most was refused in bfloat16."""
    model = build("zamba2", {**RECURRENT["zamba2"], "vocab_size": 300}, seed=3)
    assert LLM(model.to(torch.bfloat16), num_blocks=4).engine.pool.states is not None


def test_a_layer_that_also_attends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would attend for some tokens of a batch, by a plan for all of them."""
    compute = modeling_lfm2.Lfm2ShortConv.forward

    @wraps(compute)
    def attend_besides(layer: Any, hidden_states: torch.Tensor, cache: Any = None, **rest: Any) -> torch.Tensor:
        if (current := running.get(None)) is not None:
            current.attend(layer.layer_idx, NewTokens(*3 * [hidden_states[:, None]]))
        mixed: torch.Tensor = compute(layer, hidden_states, cache, **rest)
        return mixed

    monkeypatch.setattr(modeling_lfm2.Lfm2ShortConv, "forward", attend_besides)
    with pytest.raises(UnsupportedModelError, match=r"^Lfm2ForCausalLM: its recurrent layers \(Lfm2ShortConv\) attend"):
        make("lfm2")


def test_layers_are_not_compiled() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^Lfm2ForCausalLM: torch\.compile cannot .* sequence by sequence"):
        make("lfm2", enable_torch_compile=True)


def test_a_model_runs_by_itself_and_in_another_engine_as_before() -> None:
    model = build("qwen3_next", RECURRENT["qwen3_next"])
    expected = tokens_of_transformers(model, stem_and_tails(), 8)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in stem_and_tails()]
    for _ in range(2):
        assert tokens_of(LLM(model, num_blocks=50), prompts, GREEDY) == expected
    model.set_attn_implementation("eager")
    assert tokens_of_transformers(model, stem_and_tails(), 8) == expected


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [("llama", {}, 16), ("lfm2", {}, 16), ("qwen3_next", {}, 64), ("nemotron_h", {}, 256)],
)
def test_blocks_are_as_large_as_their_states_unless_that_is_very_large(
    name: str, options: dict[str, Any], expected: int
) -> None:
    llm = LLM(build(name, {**SUPPORTED, **RECURRENT}[name]), num_blocks=4, **options)
    assert llm.engine.cache.block_size == expected
