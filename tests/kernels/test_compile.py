"""Every tile class and element type compiles for the architectures, fits, does not spill, and uses tensor cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton

from radixkv_kernels import (
    TILE_ROWS,
    BlockCopier,
    advance_rows,
    attend_items,
    attend_split,
    draw_tokens,
    draw_truncated,
    exponential_sampling,
    merge_partials,
    merge_splits,
    rotate_and_write,
    truncated_sampling,
    write_cache,
)
from radixkv_kernels.target import interpreted

if interpreted():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from support.compiled_kernels import SHARED_MEMORY, Compiled, compile_only, grids_only

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn

# The instruction that multiplies matrices: 16 rows on each warp's own tensor core, from 64 on those of a warp group.
WIDE = {90: "wgmma.mma_async", 100: "tcgen05.mma"}
ARCHITECTURES = tuple(SHARED_MEMORY)
# Sizes of keys and values. Others are padded to these, which adds masks; 192 and 128 are DeepSeek's.
HEAD_SIZES = ((64, 64), (128, 128), (192, 128), (256, 256))


@dataclass(frozen=True)
class Case:
    """One kernel configuration; ``dtype`` is the cache's."""

    arch: int
    dtype: torch.dtype
    tile_rows: int
    key_dim: int = 128
    value_dim: int = 128

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"sm_{self.arch}-{dtype}-{self.tile_rows}x{self.key_dim}/{self.value_dim}"

    @property
    def may_spill(self) -> bool:
        if self.dtype == FP32:
            # Multiplied without tensor cores, so operands and results fill the registers. The engine uses 16 rows for float32
            # wherever a group fits; the type is there for comparison, not for speed. Heads of 192 and 128: one number a turn.
            return self.tile_rows > 16 or (self.arch == 80 and self.key_dim > self.value_dim)
        if self.arch == 90 and self.dtype == FP8 and self.key_dim == 256:
            # Converted in registers: with 32 keys once or twice a turn, by Triton 3.6.
            return self.tile_rows > 16
        if self.arch == 100 and self.dtype == FP8 and self.key_dim > self.value_dim:
            # One number a turn, by Triton 3.7.
            return self.tile_rows == 64
        # Operands that live in registers, beside a result of 128 rows. The engine takes 64 rows there.
        return self.arch not in WIDE and self.key_dim > 128 and self.tile_rows == 128


def compile_attention(case: Case, **options: object) -> Compiled:
    dtype = BF16 if case.dtype == FP8 else case.dtype
    scales = {"key_scales": torch.ones(8), "value_scales": torch.ones(8)} if case.dtype == FP8 else {}
    keys, values = (torch.zeros(4, 16, 8, dim).to(case.dtype) for dim in (case.key_dim, case.value_dim))
    with compile_only(case.arch) as compiled:
        attend_items(
            torch.zeros(8, 32, case.key_dim, dtype=dtype),
            keys,
            values,
            torch.zeros(8, 16, dtype=torch.int32),
            torch.zeros(8, dtype=torch.int32),
            torch.zeros(4, 6, dtype=torch.int32),
            torch.zeros(8, 32, case.value_dim, dtype=dtype),
            torch.zeros(32, 32, case.value_dim),
            torch.zeros(32, 32),
            tile_rows=case.tile_rows,
            scale=0.1,
            **scales,
            **options,
        )
    return compiled[0]


def check_spills(kernel: Compiled) -> None:
    """None, except for a few numbers stored before all loops and fetched after them, so that more programs fit."""
    assert kernel.spills_in_loops == 0
    assert kernel.spills <= (20 if kernel.registers == 255 else 6)


def check_compiles(case: Case, **options: object) -> None:
    kernel = compile_attention(case, **options)
    assert kernel.shared <= SHARED_MEMORY[case.arch]
    if not case.may_spill:
        check_spills(kernel)
    if case.dtype != FP32:
        assert ("mma.sync" if case.tile_rows == 16 else WIDE.get(case.arch, "mma.sync")) in kernel.operations
    if case.dtype == FP8 and case.arch < 100:  # later versions name all 16-bit types alike
        assert kernel.multiplied == {"f16"}
    assert kernel.byte_reads == 0
    # Every loop computes one tile while keys and values of the next are on their way, which are two groups of copies. Where
    # heads of 256 leave no room for that, there are no such groups.
    fits = case.dtype != FP32 and not (case.tile_rows == 128 and case.key_dim > 128 and case.arch not in WIDE)
    if fits or (case.dtype == FP32 and case.tile_rows == 16):
        assert len(kernel.under_way) == 2 + ("window" in options)
        assert min(kernel.under_way) >= 2


# Each architecture, tile class, element type and size of heads, and the pairs of them that have gone wrong: among them wide
# tiles where they have instructions of their own, float8, keys wider than values, and what hardly fits. With 16 rows all
# architectures are alike; heads of 256 for sm_90 are compiled below, with options.
SELECTION = [
    *(Case(90, BF16, rows) for rows in TILE_ROWS),
    Case(89, FP8, 16),
    Case(90, FP8, 128),
    Case(100, FP8, 64),
    Case(100, BF16, 128),
    Case(80, BF16, 64),
    Case(89, BF16, 64, 256, 256),
    Case(90, FP16, 64, 64, 64),
    Case(90, FP32, 16),
    Case(90, BF16, 64, 96, 96),
    Case(86, BF16, 64, 192),
    Case(90, FP16, 64, 192),
    Case(120, BF16, 128),
]
EVERYTHING = [
    case
    for arch in ARCHITECTURES
    for dtype in (BF16, FP16, FP32, FP8)
    for key_dim, value_dim in HEAD_SIZES
    for rows in TILE_ROWS
    # Before sm_89 nothing converts float8_e4m3fn. Groups of more than 64 heads in float32, for minutes: no.
    if not (dtype == FP8 and arch < 89) and not (dtype == FP32 and rows == 128)
    if (case := Case(arch, dtype, rows, key_dim, value_dim)) not in SELECTION
]


@pytest.mark.parametrize("case", SELECTION, ids=str)
def test_attention_compiles_for_what_it_was_written_for(case: Case) -> None:
    check_compiles(case)


@pytest.mark.nightly
@pytest.mark.parametrize("case", EVERYTHING, ids=str)
def test_every_configuration_compiles(case: Case) -> None:
    check_compiles(case)


@pytest.mark.parametrize(("dim", "tile_rows"), [(64, 16), (256, 64)])
def test_options_cost_no_more_than_fits(dim: int, tile_rows: int) -> None:
    check_compiles(Case(90, BF16, tile_rows, dim, dim), window=100, softcap=30.0)


def test_rows_that_no_tile_fits_beside_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tile_rows: 128 rows of 256 elements in float32 do not fit .* sm_89"):
        compile_attention(Case(89, FP32, 128, 256, 256))


# The oldest, without float8, and the newest.
@pytest.mark.parametrize(
    ("arch", "cache_dtype"),
    [(80, BF16), (120, FP8), *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((100, BF16), (90, FP8)))],
    ids=str,
)
def test_kernels_other_than_item_attention_compile_without_spilling(
    arch: int, cache_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As from Triton 3.10 on.
    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", False)
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
        new_query, slots = torch.zeros(16, 32, 128, dtype=BF16), torch.zeros(16, dtype=torch.int64)
        for rotary_dim in (128, 32):
            angles = torch.zeros(16, rotary_dim, dtype=BF16)
            rotate_and_write(new_query, new, new, angles, angles, cache, cache, slots, new_query.clone(), **scales)
        BlockCopier([cache]).copy([(0, 1, 16)])
        advance_rows(ints[:8], torch.zeros(8, dtype=torch.int64), ints.view(1, 9), ints[:8], block_size=16)
        drawn = torch.zeros(2, 5000), torch.ones(2), torch.zeros(2, dtype=torch.int64)
        draw_tokens(*drawn)
        draw_truncated(*drawn, min_p=torch.zeros(2), top_k=torch.ones(2, dtype=torch.int32), top_p=torch.ones(2))
    assert len(compiled) == 15
    for kernel in compiled:
        check_spills(kernel)
        assert kernel.fp_fusion


def test_draws_of_any_number_of_rows_begin_on_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is compiled anew for a pointer that does not, and whoever met that number of rows first would wait for it."""
    given: list[Any] = []

    class Launches:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: given.extend(args)

    for module, names in (
        (exponential_sampling, ("_draw_block", "_draw_id")),
        (
            truncated_sampling,
            ("_weigh_blocks", "_find_bound", "_count_candidates", "_write_candidates", "_draw_candidate"),
        ),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Launches())
    for num_rows in (1, 2, 3):
        row = torch.ones(num_rows)
        drawn = torch.zeros(num_rows, 9000), row, torch.zeros(num_rows, dtype=torch.int64)
        draw_tokens(*drawn)
        draw_truncated(*drawn, min_p=row, top_k=torch.ones(num_rows, dtype=torch.int32), top_p=row)
    addresses = [argument.data_ptr() for argument in given if isinstance(argument, torch.Tensor)]
    assert len(addresses) == 3 * (13 + 34)
    assert all(address % 16 == 0 for address in addresses)


def test_what_grows_with_the_work_is_in_a_grids_first_dimension() -> None:
    """The others end at 65,535. Batches, prompts and lists of copies may be longer."""
    many = 70_000
    query, new = torch.zeros(8, 32, 128, dtype=BF16), torch.zeros(many, 8, 128, dtype=BF16)
    cache = torch.zeros(4, 16, 8, 128, dtype=BF16)
    ints, rows = torch.zeros(many + 1, dtype=torch.int32), torch.zeros(many, 1, 1)
    tables, partials = ints.view(1, many + 1), (torch.zeros(many, 1, 1), torch.zeros(many, 1))
    with grids_only() as grids:
        attend_items(
            query, cache, cache, tables, ints[:8], torch.zeros(many, 6, dtype=torch.int32), query.clone(),
            torch.zeros(0, 32, 128), torch.zeros(0, 32), tile_rows=16, scale=1.0,
        )  # fmt: skip
        merge_splits(*partials, rows, num_splits=1)
        merge_partials(*partials, ints, ints, ints[:many], rows)
        write_cache(new, new, cache, cache, torch.zeros(many, dtype=torch.int64))
        BlockCopier([cache]).launch(torch.zeros(many, 3, dtype=torch.int32))
        advance_rows(ints[:many], torch.zeros(many, dtype=torch.int64), tables, ints[:many], block_size=16)
    assert grids == [
        (8 * many,),
        (many, 1),
        (many, 1),
        (many // 16, 8),
        (many, 1),
        (547,),
    ]
