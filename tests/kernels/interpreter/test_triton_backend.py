"""The Triton backend, kernels interpreted, against attention written out in float64, on random trees of sequences."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_batches import (
    Batch,
    Chunk,
    Table,
    check,
    check_cuts,
    make_batch,
    make_pool,
    query_batch,
    random_tokens,
)
from support.poisoned_pool import poison
from triton.runtime.interpreter import InterpretedFunction

from radixkv.attention import AttentionOptions, NewTokens
from radixkv.attention.triton import TritonBackend, cost_model
from radixkv.attention.triton.launches import PartialResults
from radixkv.attention.triton.padded_decode import PaddedDecode
from radixkv.attention.triton.work_items import HeadShape
from radixkv.memory import LayerShape


class Repeatable:
    """An interpreted kernel in place of a compiled one."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self._run(*arguments, grid=grid, warmup=False)


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches are repeated as on a GPU; the names of the kernels that were."""
    names: list[str] = []
    run = InterpretedFunction.run

    def run_repeatable(kernel: InterpretedFunction, *args: object, **options: Any) -> Repeatable:
        def again(*args: object, **options: Any) -> None:
            names.append(kernel.fn.__name__)
            run(kernel, *args, **options)

        run(kernel, *args, **options)
        return Repeatable(again)

    monkeypatch.setattr(InterpretedFunction, "run", run_repeatable)
    return names


def make_backend(batch: Batch, group: int) -> TritonBackend:
    return TritonBackend(batch.pool, torch.float32, group * batch.pool.layers[0].num_kv_heads, 8, 2000)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_sequences=st.integers(1, 4),
    max_tokens=st.sampled_from([3, 20, 50]),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3, 20]),
    value_dim=st.sampled_from([8, 24]),
    softcap=st.sampled_from([None, 2.0]),
    window=st.sampled_from([None, 1, 7, 40]),
    with_sinks=st.booleans(),
    share_from=st.sampled_from([0, 2**40]),
    piece=st.sampled_from([16, 256]),
    fp8=st.booleans(),
)
def test_every_row_attends_to_exactly_its_own_tokens(
    seed: int,
    num_sequences: int,
    max_tokens: int,
    kv_heads: int,
    group: int,
    value_dim: int,
    softcap: float | None,
    window: int | None,
    with_sinks: bool,
    share_from: int,
    piece: int,
    fp8: bool,
) -> None:
    torch.manual_seed(seed)
    batch = make_batch(random.Random(seed), LayerShape(kv_heads, 8, value_dim), 16, num_sequences, max_tokens, fp8)
    with pytest.MonkeyPatch.context() as patch:
        # Small thresholds, so that small batches take the paths that large ones do.
        patch.setattr(cost_model, "MIN_SAVED_BYTES", share_from)
        patch.setattr(cost_model, "MIN_PIECE_KEYS", piece)
        patch.setattr(cost_model, "PROGRAMS_PER_MULTIPROCESSOR", {16: 12, 64: 8, 128: 4})
        check(batch, make_backend(batch, group), group, softcap, window, with_sinks)


def grow(batch: Batch, num_new: Sequence[int] | None = None) -> Batch:
    """The batch one step later: every chunk's tokens are computed, and each sequence has that many tokens more."""
    size = batch.pool.block_size
    free = set(range(batch.pool.num_blocks)).difference(*(chunk.table.block_ids.tolist() for chunk in batch.chunks))
    chunks, keys, values = [], [], []
    counts = num_new or [1] * len(batch.chunks)
    for chunk, key, value, count in zip(batch.chunks, batch.keys, batch.values, counts, strict=True):
        table = chunk.table
        if len(key) + count > len(table.block_ids) * size:
            table.block_ids = np.append(table.block_ids, np.int32(free.pop()))
        chunks.append(Chunk(table, len(key), count))
        more_key, more_value = random_tokens(batch.pool, count)
        keys.append(torch.cat([key, more_key]))
        values.append(torch.cat([value, more_value]))
    return Batch(chunks, keys, values, batch.pool)


@pytest.mark.parametrize("fp8", [False, True])
def test_new_tokens_are_attended_to_as_they_are_stored(fp8: bool) -> None:
    torch.manual_seed(1)
    pool = make_pool(LayerShape(2, 8, 8), 4, 16, fp8)
    check_cuts(TritonBackend(pool, torch.float32, 4, 8, 64), pool)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("share_from", [0, 2**40], ids=["shared", "flat"])
def test_a_decoding_batch_keeps_its_plan_over_block_borders(
    share_from: int, fp8: bool, repeated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_model, "MIN_SAVED_BYTES", share_from)
    torch.manual_seed(31)
    batch = make_batch(random.Random(31), LayerShape(2, 8, 8), 16, 5, 40, fp8)
    backend = make_backend(batch, 2)
    check(batch, backend, 2)
    batch = grow(batch)
    check(batch, backend, 2)
    kept, num_borders = backend._attention, 0
    for _ in range(6):
        num_blocks = sum(len(chunk.table.block_ids) for chunk in batch.chunks)
        batch = grow(batch)
        num_borders += sum(len(chunk.table.block_ids) for chunk in batch.chunks) - num_blocks
        check(batch, backend, 2)
        assert backend._attention is kept
    assert num_borders == 3
    assert repeated[:2] == ["_write_cache", "_attend_split" if share_from else "_attend_items"]
    # Every step but the first with this plan.
    assert repeated.count("_write_cache") == 6


@pytest.mark.parametrize(("fp8", "saved"), [(False, 32), (True, 0)])
def test_sharing_is_weighed_by_the_bytes_that_are_stored(
    fp8: bool, saved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 tokens that two sequences share are worth the partial results of 4 heads a group in float32, not in float8."""
    monkeypatch.setattr(cost_model, "MIN_SAVED_BYTES", 0)
    pool = make_pool(LayerShape(2, 8, 8), 4, 16, fp8)
    batch = query_batch([Chunk(Table([0, 1, own]), 32, 1) for own in (2, 3)])
    assert TritonBackend(pool, torch.float32, 8, 2, 48).prepare(batch).plan.saved_tokens == saved


def test_a_plan_is_made_anew_when_a_sequence_leaves_joins_or_changes_a_block() -> None:
    torch.manual_seed(4)
    batch = make_batch(random.Random(4), LayerShape(1, 8, 8), 16, 5, 40)
    backend = make_backend(batch, 2)
    check(batch, backend, 2)
    batch = grow(batch)
    check(batch, backend, 2)
    batch = grow(batch)
    left = Batch(batch.chunks[1:], batch.keys[1:], batch.values[1:], batch.pool)
    check(left, backend, 2)
    check(batch, backend, 2)
    batch = grow(batch)
    moved = batch.chunks[2].table
    used = {block for chunk in batch.chunks for block in chunk.table.block_ids.tolist()}
    first, fresh = int(moved.block_ids[0]), min(set(range(batch.pool.num_blocks)) - used)
    for rows in (batch.pool.keys[0], batch.pool.values[0]):
        rows[fresh] = rows[first]
    others = [chunk.table for chunk in batch.chunks if chunk.table is not moved]
    if not any(first in table.block_ids for table in others):
        poison(batch.pool, [first])
    moved.block_ids = np.append(np.int32(fresh), moved.block_ids[1:])
    moved.version += 1
    check(batch, backend, 2)


@pytest.mark.parametrize("one_class", [False, True])
def test_tails_in_wide_tiles_give_what_they_give_in_narrow_ones(
    one_class: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranges of a decoding batch in tiles of 64 rows, or each in what fits it."""
    monkeypatch.setattr(cost_model, "MIN_SAVED_BYTES", 0)
    pool = make_pool(LayerShape(1, 8, 8), 40, 16, False)
    keys, values = random_tokens(pool, 64)
    chunks, all_keys, all_values = [], [], []
    for own in range(5):
        key, value = random_tokens(pool, 6)
        chunks.append(Chunk(Table([0, 1, 2, 3, 10 + own]), 69, 1))
        all_keys.append(torch.cat([keys, key]))
        all_values.append(torch.cat([values, value]))
    for chunk, key, value in zip(chunks, all_keys, all_values, strict=True):
        slots = torch.from_numpy(chunk.table.block_ids).repeat_interleave(16)[:69] * 16 + torch.arange(69) % 16
        pool.keys[0].view(-1, 1, 8)[slots], pool.values[0].view(-1, 1, 8)[slots] = key[:69], value[:69]
    # By the type of queries that the backend is told, which are float32 all the same, wide tiles are taken.
    backend = TritonBackend(pool, torch.float16, 16, 5, 80)
    backend.tiling = replace(backend.tiling, one_class=one_class)
    batch = Batch(chunks, all_keys, all_values, pool)
    classes = list(backend.prepare(query_batch(chunks)).items(HeadShape(1, 16)).by_tile)
    assert classes == ([64] if one_class else [16, 128])
    check(batch, backend, 16)


def test_more_sequences_or_blocks_than_there_is_capacity_for() -> None:
    batch = make_batch(random.Random(5), LayerShape(1, 8, 8), 16, 3, 40)
    with pytest.raises(ValueError, match="at most 2 sequences of 125 blocks, got 3"):
        TritonBackend(batch.pool, torch.float32, 1, 2, 2000).prepare(query_batch(batch.chunks))
    with pytest.raises(ValueError, match="at most 8 sequences of 1 blocks"):
        TritonBackend(batch.pool, torch.float32, 1, 8, 16).prepare(query_batch(batch.chunks))


@pytest.mark.parametrize(
    ("padding", "flat", "whole", "fp8"),
    [
        (0, False, False, False),
        (3, False, False, False),
        (3, True, False, False),
        (3, True, True, False),
        (3, False, False, True),
    ],
)
def test_a_padded_batch_gives_what_the_plain_one_gives(
    padding: int, flat: bool, whole: bool, fp8: bool, repeated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over steps that keep the plan, one that sequences leave, and one that they rejoin."""
    monkeypatch.setattr(cost_model, "MIN_SAVED_BYTES", 2**40 if flat else 0)
    torch.manual_seed(6)
    batch = make_batch(random.Random(6), LayerShape(2, 8, 8), 16, 5, 40, fp8)
    backend = make_backend(batch, 2)
    check(batch, backend, 2)
    padded = PaddedDecode(5 + padding, backend, not flat, PartialResults(torch.device("cpu")), whole)
    padded.items(HeadShape(2, 2))
    everyone = batch = grow(batch)
    for number in range(4):
        if number == 2:
            batch = Batch(batch.chunks[2:], batch.keys[2:], batch.values[2:], batch.pool)
        if number == 3:
            batch = everyone
        plain = backend.prepare(query_batch(batch.chunks))
        rows = len(batch.chunks)
        query, key, value = torch.randn(1, 4, rows, 8), torch.randn(1, 2, rows, 8), torch.randn(1, 2, rows, 8)
        expected = plain.attend(0, NewTokens(query, key, value), AttentionOptions(0.3))
        assert padded.load(plain)
        wide = [torch.nn.functional.pad(tensor, (0, 0, 0, 5 + padding - rows)) for tensor in (query, key, value)]
        before = [cache.clone() for cache in (batch.pool.keys[0], batch.pool.values[0])]
        output = padded.attend(0, NewTokens(*wide), AttentionOptions(0.3))
        torch.testing.assert_close(output[:, :rows], expected)
        assert not output[:, rows:].any()
        for cache, old in zip((batch.pool.keys[0], batch.pool.values[0]), before, strict=True):
            assert torch.equal(cache.view(torch.uint8), old.view(torch.uint8))
        batch = grow(batch)
    assert repeated.count("_write_cache") >= 3
    assert ("_merge" in repeated) == (not whole)


def test_a_padded_batch_with_drafts_gives_what_the_plain_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some sequences have more than one token, which see each other as a prompt's do."""
    monkeypatch.setattr(cost_model, "MIN_SAVED_BYTES", 0)
    torch.manual_seed(6)
    batch = make_batch(random.Random(6), LayerShape(1, 8, 8), 16, 3, 30)
    backend = TritonBackend(batch.pool, torch.float32, 8, 3, 2000, max_draft_rows=12)
    check(batch, backend, 8)  # which stores the new tokens
    padded = PaddedDecode(11, backend, True, PartialResults(torch.device("cpu")))
    padded.items(HeadShape(1, 8))
    batch = grow(batch, (3, 1, 5))
    plain = backend.prepare(query_batch(batch.chunks))
    new = [torch.randn(1, heads, 9, 8) for heads in (8, 1, 1)]
    expected = plain.attend(0, NewTokens(*new), AttentionOptions(0.3))
    assert padded.load(plain)
    wide = NewTokens(*(torch.nn.functional.pad(each, (0, 0, 0, 2)) for each in new))
    output = padded.attend(0, wide, AttentionOptions(0.3))
    torch.testing.assert_close(output[:, :9], expected)
    assert not output[:, 9:].any()


def test_a_batch_cut_into_more_items_than_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    batch = make_batch(random.Random(7), LayerShape(2, 8, 8), 16, 2, 150)
    backend = make_backend(batch, 2)
    check(batch, backend, 2)
    padded = PaddedDecode(2, backend, False, PartialResults(torch.device("cpu")))
    padded.items(HeadShape(2, 2))
    batch = grow(batch)
    plain = backend.prepare(query_batch(batch.chunks))
    assert padded.load(plain)
    query, key = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 2, 8)
    padded.attend(0, NewTokens(query, key, key), AttentionOptions(0.3))
    monkeypatch.setattr(cost_model, "MIN_PIECE_KEYS", 1)
    monkeypatch.setattr(cost_model, "PROGRAMS_PER_MULTIPROCESSOR", {16: 1000, 64: 1000, 128: 1000})
    again = backend.prepare(
        query_batch([Chunk(Table(chunk.table.block_ids), chunk.num_context, chunk.num_new) for chunk in batch.chunks])
    )
    assert not padded.load(again)
    assert padded.load(plain)
