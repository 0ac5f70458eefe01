"""Attention over blocks against float64, for every compiled variant; whatever a row must not read is NaN."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_variants import each_variant, use
from support.paged_batches import PagedBatch, make_paged_batch

from radixkv_cpu import PagedAttention, RowKind

DIMS = st.sampled_from([1, 8, 16, 24, 32, 40, 80, 96, 128, 256])
# In bfloat16, these add a row's products in the order of a prompt's, wherever the row stands.
HAVE_ONE_ORDER = ("amx", "avx512_bf16")
TINY = {"block_size": 4, "kv_heads": 1, "key_dim": 8, "value_dim": 8}


def check(variant: str, batch: PagedBatch, group: int, steepness: float = 1.0, **options: Any) -> None:
    """Every row and head within a stated bound.

    float32: the scores' rounding errors, which grow with the scores. bfloat16, of numbers that it holds exactly: weights are
    rounded to 8 bits before they meet the values, and so is the result; each is wrong by 2^-8 at most.
    """
    kv_heads, key_dim = batch.keys.shape[2:]
    # Heads first in memory, as projections leave them.
    query = torch.randn(kv_heads * group, len(batch.positions), key_dim).to(batch.keys.dtype).transpose(0, 1)
    options = {"scale": steepness * key_dim**-0.5, "softcap": None, "window": None, "sinks": None, **options}
    with use(variant):
        given_ = batch.attention().attend(query, batch.keys, batch.values, **options)
    expected = batch.expected(query, **options)
    magnitude = batch.expected(query, magnitude=True, **options)
    bound = 1e-5 * steepness * magnitude + 1e-7
    if given_.dtype == torch.bfloat16:
        bound = bound + 2.0**-7.99 * (magnitude + expected.abs())
    assert given_.shape == expected.shape
    assert not given_.isnan().any()
    worst = ((given_.double() - expected).abs() - bound).max()
    assert worst <= 0, f"{worst} beyond the bound"


@each_variant
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    block_size=st.sampled_from([1, 4, 16]),
    num_sequences=st.integers(1, 6),
    max_rows=st.sampled_from([1, 5, 40]),
    max_tokens=st.sampled_from([1, 20, 90, 300]),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3, 7, 16, 20]),
    key_dim=DIMS,
    value_dim=DIMS,
    softcap=st.sampled_from([None, 2.0, 50.0]),
    window=st.sampled_from([None, 1, 7, 40, 1000]),
    with_sinks=st.booleans(),
    steepness=st.sampled_from([0.5, 1.0, 8.0]),
)
def test_every_row_attends_to_exactly_its_own_keys(
    variant: str,
    seed: int,
    group: int,
    softcap: float | None,
    window: int | None,
    with_sinks: bool,
    steepness: float,
    **sizes: Any,
) -> None:
    batch = make_paged_batch(seed, **sizes)
    sinks = torch.randn(sizes["kv_heads"] * group) * 3 if with_sinks else None
    check(variant, batch, group, steepness, softcap=softcap, window=window, sinks=sinks)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("max_rows", "max_tokens", "group", "window"),
    [(300, 400, 1, None), (60, 3000, 16, None), (60, 3000, 16, 2100), (3, 900, 100, None)],
    ids=["many rows", "long chunks", "a window over long chunks", "a group larger than a tile"],
)
def test_many_rows_and_long_chunks_equal_the_reference(
    variant: str, dtype: torch.dtype, max_rows: int, max_tokens: int, group: int, window: int | None
) -> None:
    sizes = {"num_sequences": 2, "max_rows": max_rows, "max_tokens": max_tokens, **TINY}
    check(variant, make_paged_batch(0, dtype=dtype, **sizes), group, window=window)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_do_not_change_a_bit(variant: str, dtype: torch.dtype) -> None:
    batch = make_paged_batch(
        5,
        dtype=dtype,
        num_sequences=5,
        max_rows=30,
        max_tokens=700,
        block_size=16,
        kv_heads=2,
        key_dim=64,
        value_dim=40,
    )
    query = torch.randn(len(batch.positions), 6, 64).to(dtype)
    results = []
    for num_threads in (1, 2):
        with use(variant, num_threads):
            results.append(batch.attention().attend(query, batch.keys, batch.values, scale=0.1))
    assert torch.equal(*results)


@each_variant
def test_several_threads_attend_by_one_plan(variant: str) -> None:
    """Each gets the results of its own queries; calls do not share arguments."""
    batch = make_paged_batch(2, dtype=torch.float32, num_sequences=3, max_rows=9, max_tokens=90, **TINY)
    queries = [torch.randn(len(batch.positions), heads, 8) for heads in (2, 6)]
    with use(variant):
        attention = batch.attention()
        attend = partial(attention.attend, keys=batch.keys, values=batch.values, scale=0.3)
        expected = [attend(query) for query in queries]
        with ThreadPoolExecutor(2) as pool:
            same = pool.map(lambda x, y: all(torch.equal(attend(x), y) for _ in range(300)), queries, expected)
        assert list(same) == [True, True]


@each_variant
def test_a_plan_copies_its_arrays(variant: str) -> None:
    """What was checked is what is computed with."""
    arrays = {
        "row_ranges": np.array([[0, 1], [1, 2]]),
        "tables": np.array([0, 1]),
        "key_ranges": np.array([[0, 0], [3, 4]]),
        "positions": np.array([2, 3]),
        "kinds": np.array([RowKind.PROMPT, RowKind.DECODING], dtype=np.int8),
    }
    query, keys, values = torch.randn(2, 1, 8), torch.randn(2, 4, 1, 8), torch.randn(2, 4, 1, 8)
    with use(variant):
        attention = PagedAttention(block_ids=np.array([[0], [1]], dtype=np.int32), block_size=4, **arrays)
        expected = attention.attend(query, keys, values, scale=1.0)
        for array in arrays.values():
            array.fill(0)
        assert torch.equal(attention.attend(query, keys, values, scale=1.0), expected)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_query_that_is_no_number_does_not_become_one(variant: str, dtype: torch.dtype, with_sinks: bool) -> None:
    """With all scores NaN, none is above minus infinity, and a sink must not turn that into 0. Other rows are not touched."""
    batch = make_paged_batch(1, dtype=dtype, num_sequences=3, max_rows=4, max_tokens=90, **TINY)
    query = torch.randn(len(batch.positions), 2, 8).to(dtype)
    query[1, 0, 3] = float("nan")
    with use(variant):
        sinks = torch.zeros(2) if with_sinks else None
        output = batch.attention().attend(query, batch.keys, batch.values, scale=0.3, sinks=sinks)
    expected = torch.zeros(output.shape, dtype=torch.bool)
    expected[1, 0] = True
    assert torch.equal(output.isnan(), expected)


@each_variant
def test_scores_of_minus_infinity(variant: str) -> None:
    """A whole chunk of keys has them: the other keys decide, as in a softmax over all."""
    batch = make_paged_batch(
        1, dtype=torch.float32, num_sequences=1, max_rows=1, max_tokens=500, **TINY | {"block_size": 1}
    )
    length = batch.contexts[0]
    assert length > 100
    batch.keys[batch.block_ids[0, :80].long()] = float("-inf")
    query = torch.ones(1, 1, 8)
    with use(variant):
        output = batch.attention().attend(query, batch.keys, batch.values, scale=0.3)
    expected = batch.expected(query, scale=0.3, softcap=None, window=None, sinks=None)
    assert not expected.isnan().any()
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-6)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "block_size", "window"),
    [(3, 3, 64, 16, None), (2, 4, 40, 4, None), (9, 1, 64, 16, None), (2, 3, 64, 16, 100), (1, 16, 32, 16, None)],
    ids=["in place", "copied", "a head each", "a window", "a large group"],
)
def test_a_row_is_the_same_to_the_last_bit_whatever_rows_are_beside_it(
    variant: str, dtype: torch.dtype, kv_heads: int, group: int, dim: int, block_size: int, window: int | None
) -> None:
    """Drafts are rows beside the row that there is without them; few rows pass keys and values otherwise than more do."""
    torch.manual_seed(0)
    num_blocks = 560 // block_size
    keys, values = (torch.randn(num_blocks, block_size, kv_heads, dim).to(dtype) for _ in range(2))
    table = torch.randperm(num_blocks)[None].int()
    query = 3 * torch.randn(32, kv_heads * group, dim).to(dtype)
    options = {"scale": dim**-0.5, "window": window}

    def attend(first: int, past: int, kind: RowKind = RowKind.DECODING) -> torch.Tensor:
        # The rows are on both sides of where keys are split.
        batch = PagedBatch(
            [(0, past - first, 0, 0, 500 + past)],
            table,
            [500 + first],
            [past - first],
            keys,
            values,
            block_size,
            [kind],
        )
        return batch.attention().attend(query[first:past], keys, values, **options)

    with use(variant):
        together = attend(0, 32)
        for first, past in ((0, 1), (1, 2), (2, 4), (4, 9), (9, 16), (16, 31), (31, 32)):
            assert torch.equal(attend(first, past), together[first:past]), (first, past)
            if dtype == torch.bfloat16 and variant in HAVE_ONE_ORDER:
                assert torch.equal(attend(first, past, RowKind.PROMPT), together[first:past]), (first, past)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [RowKind.PROMPT, RowKind.DECODING])
def test_a_window_within_a_range_that_follows_a_shared_block(variant: str, dtype: torch.dtype, kind: RowKind) -> None:
    """A row's keys were grouped otherwise if a row beside it saw one more: from the range's first on, or from a 64th on."""
    torch.manual_seed(0)
    keys, values = (torch.randn(40, 16, 2, 64).to(dtype) for _ in range(2))
    table = torch.randperm(40)[None].int()
    query = 3 * torch.randn(120, 6, 64).to(dtype)

    def attend(first: int, past: int) -> torch.Tensor:
        rows = past - first
        ranges = [(0, rows, 0, 0, 16), (0, rows, 0, 16, 162 + past)]
        batch = PagedBatch(ranges, table, [162 + first], [rows], keys, values, 16, [RowKind.SHARED, kind])
        return batch.attention().attend(query[first:past], keys, values, scale=0.125, window=100)

    with use(variant):
        for first, past in ((0, 2), (1, 3), (60, 62), (93, 120)):
            together = attend(first, past)
            for row in range(first, past):
                assert torch.equal(attend(row, row + 1), together[row - first : row - first + 1]), (row, first, past)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_prompts_row_is_the_same_to_the_last_bit_however_the_prompt_is_cut(
    variant: str, dtype: torch.dtype, window: int | None, with_sinks: bool
) -> None:
    """Few rows have tasks of few keys, many rows of more: their softmaxes are added alike, on both sides of the longest."""
    torch.manual_seed(0)
    context, rows, block_size = 1950, 240, 16
    num_blocks = -(-(context + rows) // block_size)
    keys, values = (torch.randn(num_blocks, block_size, 2, 16).to(dtype) for _ in range(2))
    table = torch.randperm(num_blocks)[None].int()
    query = 3 * torch.randn(rows, 6, 16).to(dtype)
    options = {"scale": 0.25, "window": window, "sinks": torch.randn(6) if with_sinks else None}

    def attend(first: int, past: int) -> torch.Tensor:
        ranges = [(0, past - first, 0, 0, context + past)]
        batch = PagedBatch(ranges, table, [context + first], [past - first], keys, values, block_size, [RowKind.PROMPT])
        return batch.attention().attend(query[first:past], keys, values, **options)

    with use(variant):
        together = attend(0, rows)
        for first, past in ((0, 1), (1, 3), (3, 12), (12, 90), (90, 239), (239, rows)):
            assert torch.equal(attend(first, past), together[first:past]), (first, past)
