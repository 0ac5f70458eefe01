"""The engine with tiers below its pool: what is loaded from them gives the same answers as what is computed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.dict_tier import FAULTS, DictTier, Fault, SlowlyRead
from support.model_zoo import build_shallow
from support.tiered_llm import GREEDY, PROMPTS, STEM, answers, evict, evict_all, free_blocks, make
from support.tiny_engine import add, finish

from radixkv import LLM
from radixkv.engine.clearing import ALL_NAMESPACES, NamespaceSelection
from radixkv.errors import StoreInUseError
from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.moves.prefix_keys import PrefixKeys
from radixkv.tiers.moves.rates import Rates
from radixkv.tiers.stack import TierStack
from radixkv.tiers.tier import BlockBytes

pytestmark = pytest.mark.usefixtures("loads_are_worth_it")


@pytest.mark.usefixtures("look_ups_are_awaited")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma3_text", {}),  # sliding windows
        ("deepseek_v3", {}),  # latent attention
        ("gpt_oss", {}),  # sinks
        ("gemma4_text", {}),  # differing head sizes
        ("llama", {"kv_cache_dtype": "fp8"}),
    ],
)
def test_what_is_loaded_answers_as_what_is_computed(name: str, options: dict[str, Any]) -> None:
    llm = make(name, host_cache_size="4MiB", **options)
    expected = answers(llm)
    evict_all(llm)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert [output.num_cached_tokens for output in outputs] == [40, 40, 40]
    assert [output.metrics.loaded_tokens for output in outputs] == [{"host": 40}] * 3
    assert all(output.metrics.load_seconds > 0 for output in outputs)
    assert free_blocks(llm) == 80


def test_several_that_want_one_prefix_load_it_once() -> None:
    tier = DictTier()
    llm = make(tiers=[tier])
    expected = answers(llm)
    evict_all(llm)
    assert answers(llm) == expected
    assert tier.num_read == 10  # the blocks of the common prefix


@pytest.mark.usefixtures("look_ups_are_awaited")
def test_what_was_loaded_for_another_prompt_counts_as_far_as_it_is_common() -> None:
    """All that was loaded for the other prompt used to count, under its medium, not only what is common."""
    near, far = DictTier(), DictTier()
    near.medium, far.medium = "near", "far"
    llm = make(tiers=[near, far], num_blocks=200)
    common = STEM[:16]
    prompts = [{"prompt_token_ids": [*common, *(factor * i % 190 + 4 for i in range(64))]} for factor in (5, 11)]
    expected = [answers(llm, prompts[:1])[0]]
    evict_all(llm)
    of_first = dict(near.blocks)
    expected += answers(llm, prompts[1:])
    evict_all(llm)
    near.blocks = of_first  # only the far tier has anything of the second prompt's end
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert [output.metrics.loaded_tokens for output in outputs] == [{"near": 79}, {"near": 16, "far": 63}]


def test_a_store_that_hangs_delays_one_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each request used to be looked up behind those given up, and took three times as long as computing it."""
    monkeypatch.setattr(Rates, "compute_seconds", lambda self, num_tokens: 0.001)
    hangs, asked = threading.Event(), []
    hangs.set()

    class Hanging(DictTier):
        def contains_prefix(self, keys: Sequence[BlockKey]) -> int:
            asked.append(len(keys))
            hangs.wait()
            return super().contains_prefix(keys)

    llm = make(tiers=[Hanging()])
    expected = answers(llm)
    evict_all(llm)
    asked.clear()
    hangs.clear()
    others = [{"prompt_token_ids": [*STEM[number:], 3]} for number in range(1, 5)]
    for prompt in others:
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert not output.metrics.loaded_tokens
    assert len(asked) == 1
    assert len([record for record in caplog.records if "looking up a prefix takes longer" in record.message]) == 1
    hangs.set()
    evict_all(llm)
    monkeypatch.setattr(Rates, "compute_seconds", lambda self, num_tokens: 1000.0)
    assert llm.engine.tiers.loads._look_ups._unanswered.done.wait(600)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert {"dict": 40} in [output.metrics.loaded_tokens for output in outputs]


def test_what_was_used_twice_is_below_before_it_is_evicted() -> None:
    tier = DictTier()
    llm = make(tiers=[tier])
    answers(llm, PROMPTS[:1])
    llm.engine.tiers.flush(60.0)
    assert not tier.blocks
    answers(llm, PROMPTS[1:2])
    llm.engine.tiers.flush(60.0)
    assert len(tier.blocks) == 10


@pytest.mark.parametrize(("policy", "num_blocks"), [("write-through", 12), ("write-back", 0)])
def test_write_policies(policy: str, num_blocks: int) -> None:
    tier = DictTier()
    llm = make(tiers=[tier], cache_write_policy=policy)
    for _ in range(2):
        answers(llm, PROMPTS[:1])
    llm.engine.tiers.flush(60.0)
    assert len(tier.blocks) == num_blocks  # of 43 tokens and the first 5 generated ones
    evict_all(llm)
    assert len(tier.blocks) == 12


def test_a_tier_cannot_change_what_the_tiers_after_it_are_given() -> None:
    class Careless(DictTier):
        def put_many(self, keys: Sequence[BlockKey], blocks: BlockBytes) -> None:
            blocks[:] = 0

    after, keys = DictTier(), PrefixKeys(b"model", b"", 16).of("", bytes(16))
    TierStack([Careless(), after]).write(keys, np.ones((1, 8), np.uint8), 0)
    assert [data for _, data in after.blocks.values()] == [bytes([1] * 8)]


@pytest.mark.usefixtures("look_ups_are_awaited")
def test_a_tier_below_another_fills_it_again() -> None:
    below = DictTier()
    llm = make(host_cache_size="4MiB", tiers=[below])
    expected = answers(llm)
    evict_all(llm)
    stack = llm.engine.tiers._stack
    stack._tiers[0].clear()
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert outputs[0].metrics.loaded_tokens == {"dict": 40}
    evict_all(llm)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert outputs[0].metrics.loaded_tokens == {"host": 40}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tier_that_fails_changes_no_token_and_loses_no_block(fault: Fault) -> None:
    tier = DictTier()
    llm = make(tiers=[tier])
    expected = answers(llm)
    for fails in (True, False, True, False):
        tier.fault = fault if fails else None
        evict_all(llm)
        assert answers(llm) == expected
        assert free_blocks(llm) == 80
    evict_all(llm)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)  # it is back
    assert outputs[0].num_cached_tokens == 40


def test_nothing_waits_for_a_slow_tier_and_abort_clear_and_shutdown_leak_nothing() -> None:
    tier = SlowlyRead()
    llm = make(tiers=[tier])
    expected = answers(llm)
    evict_all(llm)
    engine = llm.engine
    engine.tiers.loads._clock = lambda: 0.0  # loads are not given up
    for end in ("abort", "clear", "shutdown"):
        tier.may_read.clear()
        tier.reads.clear()
        waiting = add(engine, "waiting", PROMPTS[0]["prompt_token_ids"], GREEDY)
        while not tier.reads.is_set():
            engine.step()
        assert free_blocks(llm) < 80  # those in flight are counted
        other = add(engine, "other", [8, 9, 10], GREEDY)
        while not other.finished:
            engine.step()
        assert not waiting.sequences[0].output_token_ids
        if end == "abort":
            engine.abort("waiting")
            assert free_blocks(llm) == 80
        elif end == "clear":
            engine.reset_prefix_cache()
            tier.may_read.set()
            finish(engine)
            assert waiting.num_cached_tokens == 0
            assert waiting.sequences[0].output_token_ids == expected[0]
            assert not tier.blocks
        else:
            tier.may_read.set()
            llm.shutdown()
            assert tier.closed
            finish(engine)
            assert waiting.sequences[0].output_token_ids == expected[0]
        tier.may_read.set()
        assert free_blocks(llm) == 80
        answers(llm)
        evict_all(llm)


def test_a_load_that_takes_longer_than_it_is_worth_is_given_up() -> None:
    tier = SlowlyRead()
    llm = make(tiers=[tier])
    expected = answers(llm)
    evict_all(llm)
    engine = llm.engine
    now = 0.0
    engine.tiers.loads._clock = lambda: now
    request = add(engine, "waiting", PROMPTS[0]["prompt_token_ids"], GREEDY)
    while not tier.reads.is_set():
        engine.step()
    for _ in range(3):
        engine.step()
    assert not engine.scheduler.running
    now = 1e6
    while not request.finished:
        engine.step()
    assert request.sequences[0].output_token_ids == expected[0]
    assert request.num_cached_tokens == 0
    assert engine.tiers.totals.loads_given_up == 1
    tier.may_read.set()
    assert free_blocks(llm) == 80


def test_what_takes_longer_to_load_than_to_compute_is_computed() -> None:
    llm = make(host_cache_size="4MiB")
    expected = answers(llm)
    evict_all(llm)
    tiers = llm.engine.tiers
    tiers._rates.observe_load(0, 1, 1e6)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert all(not output.metrics.loaded_tokens for output in outputs)
    assert tiers.totals.loads == 0
    assert tiers.totals.loads_not_worth_it > 0


def test_other_namespaces_find_nothing_and_a_tenant_is_cleared_below_too() -> None:
    tier = DictTier()
    llm = make(tiers=[tier])
    salted = [{**prompt, "cache_salt": "a"} for prompt in PROMPTS]
    answers(llm, salted)
    evict_all(llm)
    assert llm.generate({**PROMPTS[0], "cache_salt": "b"}, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.generate(salted[0], GREEDY, use_tqdm=False)[0].num_cached_tokens == 40
    evict_all(llm)
    before = len(tier.blocks)
    llm.engine.cache.clear("a")
    assert 0 < len(tier.blocks) < before
    assert llm.generate(salted[0], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_a_tenant_with_many_salts_is_cleared_below_once() -> None:
    """Each salt used to be a clearing of the whole tenant, with a transaction on a disk; thousands took minutes."""

    class Counting(DictTier):
        def __init__(self) -> None:
            super().__init__()
            self.cleared: list[bytes | None] = []

        def clear(self, namespace: bytes | None = None) -> None:
            self.cleared.append(namespace)
            super().clear(namespace)

    tier = Counting()
    llm = make(tiers=[tier])
    answers(llm, [{**prompt, "cache_salt": f"ann/{number}"} for number, prompt in enumerate(PROMPTS)])
    evict_all(llm)
    assert tier.blocks
    cleared = llm.engine.clear(NamespaceSelection("ann"))
    assert cleared.namespaces == 0
    answers(llm, [{**prompt, "cache_salt": f"ann/{number}"} for number, prompt in enumerate(PROMPTS)])
    assert llm.engine.clear(NamespaceSelection("ann")).namespaces == 3
    assert len(tier.cleared) == 2
    assert not tier.blocks
    llm.engine.cache.clear("ann/1")  # by itself, at once
    llm.engine.clear(ALL_NAMESPACES)
    assert len(tier.cleared) == 4
    assert tier.cleared[-1] is None


@pytest.mark.usefixtures("look_ups_are_awaited")
@pytest.mark.parametrize("was_shut_down", [True, False])
def test_a_restart_finds_what_was_stored(tmp_path: Path, was_shut_down: bool) -> None:
    options = {"disk_cache": tmp_path, "disk_cache_size": "4MiB", "cache_write_policy": "write-through"}
    first = make(**options)
    expected = answers(first)
    with pytest.raises(StoreInUseError, match="written by process"):
        make(**options)
    reader = make(**options, disk_cache_read_only=True)
    assert answers(reader) == expected
    reader.shutdown()
    if was_shut_down:
        first.shutdown()
    else:  # only what is queued is written
        del first
        gc.collect()
    with make(**options) as second:
        assert second.engine.tiers.totals.tiers[0][1].read_bytes == 0
        outputs = second.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert outputs[0].metrics.loaded_tokens == {"disk": 40}
    for path in [tmp_path, *tmp_path.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_second_engine_finds_what_the_first_left_and_another_model_does_not() -> None:
    tier = DictTier()
    with make(tiers=[tier]) as first:
        expected = answers(first)
    outputs = make(tiers=[tier]).generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert outputs[0].num_cached_tokens == 40
    others: list[dict[str, Any]] = [{"block_size": 2}, {"kv_cache_dtype": "fp8"}, {"dtype": None}]
    for options in others:
        model = build_shallow("llama")
        if options.pop("dtype", 1) is None:
            model.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1e-3
        llm = LLM(model, **{"block_size": 4, "num_blocks": 80, "tiers": [tier], **options})
        assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_a_prefix_whose_tail_was_loaded_is_written_whole() -> None:
    """Its head stayed in the pool and was never written: it must not count as written with the loaded tail."""
    tier = DictTier()
    llm = make(tiers=[tier], cache_write_policy="write-back")
    answers(llm, PROMPTS[:1])
    evict(llm, 6)  # of the prefix's end
    num_below = len(tier.blocks)
    assert 0 < num_below < 12
    answers(llm, PROMPTS[:1])
    assert tier.num_read
    evict_all(llm)
    assert len(tier.blocks) == 12
    (output,) = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    assert output.metrics.loaded_tokens == {"dict": 40}


def test_a_pool_that_cannot_be_read_loses_blocks_and_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DictTier()
    llm = make(tiers=[tier], cache_write_policy="write-back")
    expected = answers(llm)

    for error in (RuntimeError, MemoryError):  # torch's and numpy's
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.tiers._rows, "read", Mock(side_effect=error("out of memory")))
            evict_all(llm)
            assert answers(llm) == expected
    assert not tier.blocks
    evict_all(llm)
    assert tier.blocks  # there is room in the queue again
