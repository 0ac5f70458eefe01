"""Every tile class and element type compiles for the architectures, fits, does not spill, and uses tensor cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from radixkv_kernels import (
    BlockCopier,
    advance_rows,
    attend_items,
    attend_split,
    draw_tokens,
    exponential_sampling,
    merge_partials,
    merge_splits,
    write_cache,
)
from radixkv_kernels.target import interpreted

if interpreted():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from support.compiled_kernels import SHARED_MEMORY, Compiled, compile_only

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn

# The instruction that multiplies matrices: 16 rows on each warp's own tensor core, from 64 on those of a warp group.
NARROW = {80: "HMMA", 90: "HMMA", 100: "HMMA"}
WIDE = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}

# What spills, and why it may.
SPILLS = {
    # Multiplied without tensor cores, so operands and results fill the registers. The engine uses 16 rows for float32
    # wherever a group fits; the type is there for comparison, not for speed.
    (FP32, 64, 128),
    (FP32, 128, 128),
}


def compile_attention(arch: int, cache_dtype: torch.dtype, tile_rows: int, dim: int, **options: object) -> Compiled:
    dtype = BF16 if cache_dtype == FP8 else cache_dtype
    scales = {"key_scales": torch.ones(8), "value_scales": torch.ones(8)} if cache_dtype == FP8 else {}
    cache = torch.zeros(4, 16, 8, dim).to(cache_dtype)
    with compile_only(arch) as compiled:
        attend_items(
            torch.zeros(8, 32, dim, dtype=dtype),
            cache,
            cache,
            torch.zeros(8, 16, dtype=torch.int32),
            torch.zeros(8, dtype=torch.int32),
            torch.zeros(4, 6, dtype=torch.int32),
            torch.zeros(8, 32, dim, dtype=dtype),
            torch.zeros(32, 32, dim),
            torch.zeros(32, 32),
            tile_rows=tile_rows,
            scale=0.1,
            **scales,
            **options,
        )
    return compiled[0]


# float16 compiles to the same instructions as bfloat16 but for their type, so that it is looked at once a tile class.
# sm_80 has no conversion from float8_e4m3fn.
CASES = [
    (arch, dtype, tile_rows)
    for arch, dtypes in {80: [BF16], 90: [BF16, FP16, FP32, FP8], 100: [BF16, FP8]}.items()
    for dtype in dtypes
    for tile_rows in (16, 64, 128)
    if not (dtype == FP32 and tile_rows == 128)
]


@pytest.mark.parametrize(("arch", "dtype", "tile_rows"), [*CASES, (80, FP16, 64), (80, FP32, 16), (100, FP16, 128)])
def test_attention_compiles_for_what_it_was_written_for(arch: int, dtype: torch.dtype, tile_rows: int) -> None:
    kernel = compile_attention(arch, dtype, tile_rows, 128)
    assert kernel.shared <= SHARED_MEMORY[arch]
    if (dtype, tile_rows, 128) not in SPILLS:
        assert kernel.spills == 0
    if dtype != FP32:
        assert (NARROW if tile_rows == 16 else WIDE)[arch] in kernel.operations
    # Every loop computes one tile while keys and values of the next are on their way, which are two groups of copies.
    assert len(kernel.under_way) == 2
    assert min(kernel.under_way) >= 2


@pytest.mark.parametrize(("dim", "tile_rows"), [(64, 16), (64, 128), (256, 16), (256, 64), (96, 64)])
def test_head_sizes(dim: int, tile_rows: int) -> None:
    kernel = compile_attention(90, BF16, tile_rows, dim, window=100, softcap=30.0)
    assert kernel.spills == 0
    assert kernel.shared <= SHARED_MEMORY[90]


@pytest.mark.parametrize(("arch", "cache_dtype"), [(80, BF16), (90, BF16), (100, BF16), (90, FP8), (100, FP8)], ids=str)
def test_the_other_kernels(arch: int, cache_dtype: torch.dtype) -> None:
    query, new = torch.zeros(8, 32, 128, dtype=BF16), torch.zeros(16, 8, 128, dtype=BF16)
    cache = torch.zeros(4, 16, 8, 128, dtype=cache_dtype)
    scales = {"key_scales": torch.ones(8), "value_scales": torch.ones(8)} if cache_dtype == FP8 else {}
    ints = torch.zeros(9, dtype=torch.int32)
    partials = torch.zeros(16, 32, 128), torch.zeros(16, 32)
    with compile_only(arch) as compiled:
        attend_split(
            query,
            cache,
            cache,
            torch.zeros(8, 16, dtype=torch.int32),
            ints[:8],
            ints[:8],
            query,
            *partials,
            num_splits=2,
            scale=1.0,
            **scales,
        )
        merge_splits(*partials, query, num_splits=2)
        merge_partials(*partials, ints, ints, ints[:8], query, sinks=torch.zeros(32))
        write_cache(new, new, cache, cache, torch.zeros(16, dtype=torch.int64), **scales)
        BlockCopier([cache]).copy([(0, 1, 16)])
        advance_rows(ints[:8], torch.zeros(8, dtype=torch.int64), ints.view(1, 9), ints[:8], block_size=16)
        draw_tokens(torch.zeros(2, 5000), torch.ones(2), torch.zeros(2, dtype=torch.int64))
    assert len(compiled) == 8
    assert all(kernel.spills == 0 for kernel in compiled)


def test_draws_of_any_number_of_rows_begin_on_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is compiled anew for a pointer that does not, and whoever met that number of rows first would wait for it."""
    given: list[Any] = []

    class Launches:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: given.extend(args)

    monkeypatch.setattr(exponential_sampling, "_draw_block", Launches())
    monkeypatch.setattr(exponential_sampling, "_draw_id", Launches())
    for num_rows in (1, 2, 3):
        draw_tokens(torch.zeros(num_rows, 9000), torch.ones(num_rows), torch.zeros(num_rows, dtype=torch.int64))
    addresses = [argument.data_ptr() for argument in given if isinstance(argument, torch.Tensor)]
    assert len(addresses) == 3 * 13
    assert all(address % 16 == 0 for address in addresses)


def test_what_grows_with_the_work_is_in_a_grids_first_dimension() -> None:
    """The others end at 65,535. Batches, prompts and lists of copies may be longer."""
    many = 70_000
    query, new = torch.zeros(8, 32, 128, dtype=BF16), torch.zeros(many, 8, 128, dtype=BF16)
    cache = torch.zeros(4, 16, 8, 128, dtype=BF16)
    ints, rows = torch.zeros(many + 1, dtype=torch.int32), torch.zeros(many, 1, 1)
    tables, partials = ints.view(1, many + 1), (torch.zeros(many, 1, 1), torch.zeros(many, 1))
    with compile_only(90) as compiled:
        attend_items(
            query, cache, cache, tables, ints[:8], torch.zeros(many, 6, dtype=torch.int32), query.clone(),
            torch.zeros(0, 32, 128), torch.zeros(0, 32), tile_rows=16, scale=1.0,
        )  # fmt: skip
        merge_splits(*partials, rows, num_splits=1)
        merge_partials(*partials, ints, ints, ints[:many], rows)
        write_cache(new, new, cache, cache, torch.zeros(many, dtype=torch.int64))
        BlockCopier([cache]).launch(torch.zeros(many, 3, dtype=torch.int32))
        advance_rows(ints[:many], torch.zeros(many, dtype=torch.int64), tables, ints[:many], block_size=16)
    assert [kernel.grid for kernel in compiled] == [
        (8 * many,),
        (many, 1),
        (many, 1),
        (many // 16, 8),
        (many, 1),
        (547,),
    ]
