"""The last block of a prefix, partly filled: it goes down and comes back, so that a prefix is loaded to the token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.dict_tier import DictTier, PartlyFilledDictTier
from support.tiered_llm import GREEDY, STEM, answers, evict_all, free_blocks, make

from radixkv import LLM, SamplingParams
from radixkv.cache.tokens import encode
from radixkv.prompts import Prompt
from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.moves.prefix_keys import PrefixKeys
from radixkv.tiers.moves.prefix_search import find_prefix
from radixkv.tiers.moves.writer import PrefixBlocks
from radixkv.tiers.stack import Span, TierStack

pytestmark = pytest.mark.usefixtures("loads_are_worth_it")

ONE = SamplingParams(temperature=0.0, max_tokens=1)
# Eleven blocks of four tokens and three more, with what is generated from the stem, except for the last token.
NUM_STORED = len(STEM) + GREEDY.max_tokens - 1


def prompt(token_ids: list[int]) -> Any:
    return {"prompt_token_ids": token_ids}


def turns(llm: LLM) -> tuple[Any, Any]:
    """A first turn, and the next one, which goes on from it."""
    (first,) = llm.generate([prompt(STEM)], GREEDY, use_tqdm=False)
    history = [*STEM, *first.outputs[0].token_ids]
    (second,) = llm.generate([prompt([*history[:NUM_STORED], 9, 11, 5])], GREEDY, use_tqdm=False)
    return first, second


@pytest.mark.parametrize(
    ("name", "options", "store"),
    [
        ("gemma3_text", {}, "disk"),  # sliding windows
        ("deepseek_v3", {}, "folder"),  # latent attention
        ("gpt_oss", {}, "sealed disk"),  # sinks
        ("gemma4_text", {}, "disk"),  # differing head sizes
        ("llama", {"kv_cache_dtype": "fp8"}, "folder"),
    ],
)
def test_a_prefix_is_loaded_to_the_token(
    name: str, options: dict[str, Any], store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if store == "sealed disk":
        pytest.importorskip("cryptography")
        monkeypatch.setenv("RADIXKV_STORE_KEY", "5a" * 32)
    tier = {"shared_cache": str(tmp_path)} if store == "folder" else {"disk_cache": tmp_path, "disk_cache_size": "4MiB"}
    expected = [output.outputs[0].token_ids for output in turns(make(name, **options))]
    with make(name, **options, **tier) as first:
        answers(first, [prompt(STEM)])
    medium = "shared" if store == "folder" else "disk"
    with make(name, **options, **tier) as second:
        assert second.engine.tiers is not None
        (below,) = second.engine.tiers.find(encode([*STEM, *expected[0]]), "", 0)
        assert (below.medium, below.start, below.num_tokens) == (medium, 0, NUM_STORED)
        (output,) = second.generate([prompt([*STEM, *expected[0][:-1], 9, 11, 5])], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == NUM_STORED
        assert output.metrics.loaded_tokens == {medium: NUM_STORED}
        assert output.outputs[0].token_ids == expected[1]
        assert free_blocks(second) == 80


@pytest.mark.parametrize("length", [40, 42])
def test_of_a_prompt_that_is_known_word_for_word_only_the_last_token_is_computed(tmp_path: Path, length: int) -> None:
    """Of a prompt of whole blocks, the whole last one used to be computed."""
    options = {"disk_cache": tmp_path, "disk_cache_size": "4MiB"}
    with make(**options) as first:
        (expected,) = first.generate([prompt(STEM[:length])], ONE, use_tqdm=False)
    with make(**options) as second:
        (output,) = second.generate([prompt(STEM[:length])], ONE, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.num_cached_tokens == length - 1
    assert output.metrics.loaded_tokens == {"disk": length - 1}


def test_what_is_evicted_comes_back_to_the_token() -> None:
    expected = [output.outputs[0].token_ids for output in turns(make())]
    llm = make(host_cache_size="4MiB")
    assert answers(llm, [prompt(STEM)]) == expected[:1]
    evict_all(llm)
    (output,) = llm.generate([prompt([*STEM, *expected[0][:-1], 9, 11, 5])], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == expected[1]
    assert output.num_cached_tokens == NUM_STORED
    assert output.metrics.loaded_tokens == {"host": NUM_STORED}
    assert free_blocks(llm) == 80


def test_where_prompts_part_inside_a_block_what_they_share_of_it_is_stored_without_the_rest() -> None:
    """The stored row must not hold keys and values of the first prompt's own tokens, nor of what the block held before."""
    tier = PartlyFilledDictTier()
    llm = make(tiers=[tier])
    own = [[*STEM, 5 + number, 9, 11] for number in range(3)]
    answers(llm, [prompt(own[0])])
    llm.engine.tiers.flush(60.0)
    assert not tier.blocks
    answers(llm, [prompt(own[1])])
    llm.engine.tiers.flush(60.0)
    partly = [(key, data) for key, data in tier.blocks.values() if not key.is_whole]
    ((key, data),) = partly
    assert np.frombuffer(key.tokens, np.int32).tolist() == STEM[40:]
    pool = llm.engine.pool
    row = np.frombuffer(data, np.uint8)
    shapes = [tensor.shape[1:] for pair in zip(pool.keys, pool.values, strict=True) for tensor in pair]
    assert len({shape[1:] for shape in shapes}) == 1
    positions = row.reshape(len(shapes), 4, -1).any(axis=(0, 2))
    assert positions.tolist() == [True, True, False, False]
    with make(tiers=[tier]) as second:
        (output,) = second.generate([prompt(own[2])], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == len(STEM)
        assert [output.outputs[0].token_ids] == answers(make(), [prompt(own[2])])


def test_a_block_with_few_tokens_and_one_before_which_nothing_is_are_not_stored() -> None:
    tier = PartlyFilledDictTier()
    llm = make(block_size=8, tiers=[tier])
    for token_ids in (STEM[:41], STEM[1:7]):
        llm.generate([prompt(token_ids)], ONE, use_tqdm=False)
    evict_all(llm)
    assert sorted(key.is_whole for key, _ in tier.blocks.values()) == [True] * 5
    llm.generate([prompt(STEM[:42])], ONE, use_tqdm=False)
    evict_all(llm)
    assert sorted(key.is_whole for key, _ in tier.blocks.values()) == [False] + [True] * 5


class WholeOnly(DictTier):
    """Is given keys of whole blocks only, and told when they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[BlockKey] = []

    def mark_used(self, prefix: Sequence[BlockKey]) -> None:
        self.used += prefix


def test_a_store_of_whole_blocks_is_given_no_others_and_asked_for_none() -> None:
    whole, below = WholeOnly(), PartlyFilledDictTier()
    llm = make(tiers=[whole, below])
    (expected,) = answers(llm, [prompt(STEM)])
    evict_all(llm)
    assert all(key.is_whole for key, _ in whole.blocks.values())
    assert not all(key.is_whole for key, _ in below.blocks.values())
    (output,) = llm.generate([prompt([*STEM, *expected[:-1], 12, 11])], ONE, use_tqdm=False)
    assert output.num_cached_tokens == NUM_STORED
    assert below.num_read_partly_filled == 1
    assert whole.used
    assert all(key.is_whole for key in whole.used)


def test_without_a_tier_that_keeps_them_none_are_read_out_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(tiers=[DictTier()])
    writer, parts = llm.engine.tiers._writer, list[PrefixBlocks]()
    put = writer.put

    def note(new: list[PrefixBlocks], *rest: Any) -> None:
        parts.extend(new)
        put(new, *rest)

    monkeypatch.setattr(writer, "put", note)
    for _ in range(2):
        turns(llm)
        evict_all(llm)
    assert parts
    assert all(len(part.tokens) == part.stop * 16 for part in parts)


def test_what_a_tier_lost_is_written_again() -> None:
    tier = PartlyFilledDictTier()
    llm = make(tiers=[tier])
    for num_cached in (0, 40, 41):
        (output,) = llm.generate([prompt(STEM)], ONE, use_tqdm=False)
        assert output.num_cached_tokens == num_cached
        evict_all(llm)
        (lost,) = [digest for digest, (key, _) in tier.blocks.items() if not key.is_whole]
        if num_cached == 0:
            del tier.blocks[lost]


def test_the_longest_is_taken_and_among_equals_the_nearest() -> None:
    keys = PrefixKeys(b"model", b"", 16)
    tokens = np.arange(11, dtype=np.int32).tobytes()
    near, far = PartlyFilledDictTier(), PartlyFilledDictTier()
    stack = TierStack([near, far])
    lengths = keys.partly_filled("", tokens, 2)
    assert [len(key.tokens) for key in lengths] == [12, 8, 4]
    whole = keys.of("", tokens)
    row = np.ones((1, 8), np.uint8)

    def found() -> tuple[int, list[Span]]:
        prefix, spans = find_prefix(stack, keys, "", tokens, 0)
        return len(prefix[-1].tokens), spans

    near.put_many([lengths[2]], row)
    assert [len(key.tokens) for key in PrefixKeys(b"model", b"", 32).partly_filled("", tokens, 1)] == [12, 8]
    assert find_prefix(stack, keys, "", tokens, 0) == (whole, [])  # nothing whole is there
    far.put_many(whole, np.ones((2, 8), np.uint8))
    assert found() == (4, [Span(1, 0, 2), Span(0, 2, 3)])
    far.put_many([lengths[2]], row)
    assert found() == (4, [Span(1, 0, 2), Span(0, 2, 3)])
    far.put_many([lengths[1]], row)
    assert found() == (8, [Span(1, 0, 3)])
    assert find_prefix(stack, keys, "", tokens[:32], 0) == (whole, [Span(1, 0, 2)])
    assert find_prefix(stack, keys, "", tokens, 2) == (whole, [])  # alone, it is not worth a load


@pytest.mark.parametrize("length", [42, 43, 44])
def test_a_prompt_that_fills_the_pool_is_loaded_and_copied(length: int) -> None:
    """The block that its last tokens are copied from is the only one that can make room for the copy."""
    token_ids = [*STEM, 7, 8][:length]
    (expected,) = make().generate([prompt(token_ids)], ONE, use_tqdm=False)
    llm = make(num_blocks=11, host_cache_size="4MiB")
    for num_cached in (0, length - 1, length - 1):
        (output,) = llm.generate([prompt(token_ids)], ONE, use_tqdm=False)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.num_cached_tokens == num_cached
        evict_all(llm)
        assert free_blocks(llm) == 11


def test_a_block_whose_copy_is_still_to_be_made_is_not_stored() -> None:
    """A fork that ends before it computed anything leaves its copy of the last block to the tree, where it may be evicted."""
    tier = PartlyFilledDictTier()
    llm = make(tiers=[tier])
    cache = llm.engine.cache
    table = cache.open(STEM)
    cache.reserve(table, len(STEM))
    cache.append(table, STEM)
    (fork,) = cache.fork(table)
    cache.reserve(fork, len(STEM) + 1)
    cache.close(fork)
    assert len(cache.copy_targets) == 1
    assert cache.cached_blocks(STEM)[-1] in cache.copy_targets
    evict_all(llm)
    assert not any(not key.is_whole for key, _ in tier.blocks.values())
    llm.engine.pool.copy_blocks(cache.drain_copies())
    cache.close(table)
    evict_all(llm)
    assert sum(not key.is_whole for key, _ in tier.blocks.values()) == 1


def test_questions_that_part_a_little_later_by_chance_store_no_further_blocks() -> None:
    tier = PartlyFilledDictTier()
    llm = make(block_size=8, tiers=[tier])
    lengths = []
    # The third question shares a token more with the second one than they share with the first.
    for end in ([5, 9, 11, 12], [6, 9, 11, 12], [6, 10, 11, 12], [7, 9, 11, 12]):
        llm.generate([prompt([*STEM[:42], *end])], ONE, use_tqdm=False)
        llm.engine.tiers.flush(60.0)
        lengths.append(sorted(len(key.tokens) // 4 for key, _ in tier.blocks.values() if not key.is_whole))
    assert lengths == [[], [2], [2], [2]]


def test_the_end_of_a_turn_is_not_stored_when_the_next_turn_fills_its_block() -> None:
    tier = PartlyFilledDictTier()
    llm = make(tiers=[tier])
    turns(llm)
    llm.engine.tiers.flush(60.0)
    assert [key.is_whole for key, _ in tier.blocks.values()] == [True] * (NUM_STORED // 4)


def test_what_differs_in_its_last_token_from_a_cached_prompt_waits_for_no_look_up() -> None:
    llm = make(host_cache_size="4MiB")
    for last in (5, 6):
        answers(llm, [prompt([*STEM[:39], last])])
    loads = llm.engine.tiers.loads
    request = llm.engine.request_factory.make("third", Prompt([*STEM[:39], 7]), ONE)
    llm.engine.add(request)
    assert not loads.in_progress
    while not request.finished:
        llm.engine.step()
    assert request.num_cached_tokens == 39
    # What the last two share is stored to the token.
    llm.engine.tiers.flush(60.0)
    evict_all(llm)
    (output,) = llm.generate([prompt([*STEM[:39], 8])], ONE, use_tqdm=False)
    assert output.num_cached_tokens == 39


def test_a_server_is_not_asked_for_the_rest_of_what_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = PartlyFilledDictTier(), PartlyFilledDictTier()
    llm = make(tiers=[near, far])
    answers(llm, [prompt(STEM)])
    evict_all(llm)
    monkeypatch.setattr(far, "first_present", None)
    monkeypatch.setattr(far, "contains_prefix", None)
    (output,) = llm.generate([prompt([*STEM[:40], 5])], ONE, use_tqdm=False)
    assert output.num_cached_tokens == 40
    assert not llm.engine.tiers._stack._failing
