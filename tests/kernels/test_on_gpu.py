"""The kernels on a GPU: against their references, at sizes that people run, and captured in CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernel_cases import Case, make_tree, relative_error

from radixkv.sampling.exponential import draw
from radixkv.sampling.variates import SamplingRow, rng_states
from radixkv.sampling_params import SamplingParams
from radixkv_kernels import (
    BlockCopier,
    attend_items,
    attend_split,
    draw_tokens,
    merge_partials,
    merge_splits,
    reference,
    rotate_and_write,
    write_cache,
)

pytestmark = pytest.mark.gpu

needs_float8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs compute capability 8.9"
)

BOUNDS = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def on_gpu(case: Case) -> Case:
    moved = {name: value.cuda() for name, value in vars(case).items() if isinstance(value, torch.Tensor)}
    return Case(**{**vars(case), **moved, "items": {tile: items.cuda() for tile, items in case.items.items()}})


def attend(case: Case, **options: Any) -> torch.Tensor:
    output, partials, lse = case.outputs()
    for tile, items in case.items.items():
        attend_items(
            case.query, case.key_cache, case.value_cache, case.tables, case.positions, items, output, partials, lse,
            tile_rows=tile, **options,
        )  # fmt: skip
    merge_partials(partials, lse, case.starts, case.partials, case.positions, output, sinks=options.get("sinks"))
    return output


OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 77},
    {"softcap": 5.0},
    {"sinks": torch.linspace(-2, 2, 8)},
    {"window": 200, "softcap": 9.0},
]


# Every case compiles its kernels, seconds each. float32 takes wide tiles only where a group needs them.
@pytest.mark.parametrize(
    ("dtype", "tile_rows", "options"),
    [
        *((torch.bfloat16, tile_rows, options) for tile_rows in (16, 64, 128) for options in OPTIONS),
        *((torch.float16, tile_rows, OPTIONS[4]) for tile_rows in (16, 64, 128)),
        *((torch.float32, 16, options) for options in OPTIONS),
        (torch.float32, 64, {}),
    ],
    ids=str,
)
def test_items_against_the_reference(dtype: torch.dtype, tile_rows: int, options: dict[str, Any]) -> None:
    case = make_tree(
        0, levels=[(1, 512), (5, 256), (40, 300)], dtype=dtype, heads=8, kv_heads=2, key_dim=128, value_dim=128,
        tile_rows=tile_rows, split=128,
    )  # fmt: skip
    truth, partials, lse = case.outputs()
    for items in case.items.values():
        reference.attend_items(
            case.query, case.key_cache, case.value_cache, case.tables, case.positions, items, truth, partials, lse,
            scale=0.1, **options,
        )  # fmt: skip
    merge = (partials, lse, case.starts, case.partials, case.positions, truth)
    reference.merge_partials(*merge, sinks=options.get("sinks"))
    moved = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    assert relative_error(attend(on_gpu(case), scale=0.1, **moved).cpu(), truth) < BOUNDS[dtype]


@needs_float8
@pytest.mark.parametrize("tile_rows", [16, 64, 128])
def test_items_over_float8_against_the_reference(tile_rows: int) -> None:
    case = make_tree(
        1, levels=[(1, 512), (5, 256), (40, 300)], dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn, heads=8,
        kv_heads=2, key_dim=128, value_dim=128, tile_rows=tile_rows, split=128,
    )  # fmt: skip
    scales = {"key_scales": torch.tensor([0.5, 4.0]), "value_scales": torch.tensor([2.0, 0.125])}
    truth, partials, lse = case.outputs()
    for items in case.items.values():
        reference.attend_items(
            case.query, case.key_cache, case.value_cache, case.tables, case.positions, items, truth, partials, lse,
            scale=0.1, **scales,
        )  # fmt: skip
    reference.merge_partials(partials, lse, case.starts, case.partials, case.positions, truth)
    moved = {name: tensor.cuda() for name, tensor in scales.items()}
    assert relative_error(attend(on_gpu(case), scale=0.1, **moved).cpu(), truth) < BOUNDS[torch.bfloat16]


def paged(lengths: list[int], heads: int, kv_heads: int, dim: int, block_size: int) -> dict[str, torch.Tensor]:
    """Sequences of real lengths over shuffled blocks, on the GPU, in bfloat16."""
    blocks = [-(-length // block_size) for length in lengths]
    ids = torch.randperm(sum(blocks), dtype=torch.int32, device="cuda")
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32, device="cuda")
    at = 0
    for row, count in enumerate(blocks):
        tables[row, :count] = ids[at : at + count]
        at += count
    shape = (sum(blocks), block_size, kv_heads, dim)
    return {
        "query": torch.randn(len(lengths), heads, dim, device="cuda", dtype=torch.bfloat16),
        "key_cache": torch.randn(shape, device="cuda", dtype=torch.bfloat16),
        "value_cache": torch.randn(shape, device="cuda", dtype=torch.bfloat16),
        "tables": tables,
        "positions": torch.tensor([length - 1 for length in lengths], dtype=torch.int32, device="cuda"),
    }


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("batch", "length"), [(1, 65_536), (64, 4096), (256, 1000)])
def test_split_decoding_at_real_sizes(batch: int, length: int, block_size: int) -> None:
    torch.manual_seed(0)
    lengths = [length - 3 * row for row in range(batch)]
    problem = paged(lengths, 32, 8, 128, block_size)
    splits = 8
    output = torch.full_like(problem["query"], float("nan"))
    partials = torch.full((batch * splits, 32, 128), float("nan"), device="cuda")
    lse = torch.full((batch * splits, 32), float("nan"), device="cuda")
    row_tables = torch.arange(batch, dtype=torch.int32, device="cuda")
    attend_split(
        **problem, row_tables=row_tables, output=output, partial_output=partials, partial_lse=lse,
        num_splits=splits, scale=0.088,
    )  # fmt: skip
    merge_splits(partials, lse, output, num_splits=splits)
    for row in (0, batch // 2, batch - 1):
        table = problem["tables"][row].long()
        key = problem["key_cache"][table].flatten(0, 1)[: lengths[row]]
        value = problem["value_cache"][table].flatten(0, 1)[: lengths[row]]
        truth = torch.nn.functional.scaled_dot_product_attention(
            problem["query"][row].float().unsqueeze(1),
            key.float().transpose(0, 1).repeat_interleave(4, 0),
            value.float().transpose(0, 1).repeat_interleave(4, 0),
            scale=0.088,
        )
        assert relative_error(output[row], truth.squeeze(1)) < BOUNDS[torch.bfloat16]


@needs_float8
def test_float8_is_written_as_torch_rounds_it() -> None:
    torch.manual_seed(1)
    key, value = (torch.randn(100, 8, 128, device="cuda", dtype=torch.bfloat16) * 20 for _ in range(2))
    scales = torch.exp2(torch.arange(8, device="cuda") - 5.0)
    caches = [torch.zeros(10, 16, 8, 128, device="cuda", dtype=torch.float8_e4m3fn) for _ in range(2)]
    truth = [cache.clone() for cache in caches]
    slots = torch.randperm(160, device="cuda")[:100]
    write_cache(key, value, *caches, slots, key_scales=scales, value_scales=scales)
    reference.write_cache(key.float(), value.float(), *truth, slots, key_scales=scales, value_scales=scales)
    assert (truth[0].float().abs() == 448).any()
    for cache, expected in zip(caches, truth, strict=True):
        assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


def test_queries_and_keys_are_rotated_as_the_reference_rotates_them() -> None:
    torch.manual_seed(1)
    query, key, value = (torch.randn(100, heads, 128, dtype=torch.bfloat16) for heads in (32, 8, 8))
    angles = torch.randn(100, 128, dtype=torch.float32) * 30
    caches = [torch.zeros(10, 16, 8, 128, dtype=torch.bfloat16) for _ in range(2)]
    slots = torch.randperm(160)[:100]
    arguments = [query, key, value, angles.cos(), angles.sin(), *caches, slots, torch.empty_like(query)]
    on_device = [tensor.cuda() for tensor in arguments]
    rotate_and_write(*on_device)
    reference.rotate_and_write(*arguments)
    for ours, truth in zip(on_device[5:], arguments[5:], strict=True):
        assert relative_error(ours.cpu(), truth) < BOUNDS[torch.bfloat16]


def test_thousands_of_block_copies() -> None:
    torch.manual_seed(2)
    caches = [torch.randn(5000, 16, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    truth = [cache.clone() for cache in caches]
    blocks = torch.randperm(5000).tolist()
    copies = [(source, target, 1 + source % 16) for source, target in zip(blocks[:2500], blocks[2500:], strict=True)]
    BlockCopier(caches).copy(copies)
    reference.copy_blocks(truth, copies)
    assert all(torch.equal(cache, expected) for cache, expected in zip(caches, truth, strict=True))


def test_a_captured_graph_follows_what_its_buffers_say() -> None:
    """The same graph, replayed after its positions moved, gives what eager launches give."""
    case = on_gpu(
        make_tree(3, levels=[(1, 256), (8, 200)], dtype=torch.bfloat16, heads=8, kv_heads=2, key_dim=128, value_dim=128)
    )
    attend(case, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(case, scale=0.1)
    for _ in range(2):
        graph.replay()
        assert torch.equal(output, attend(case, scale=0.1))
        case.positions.sub_(1)


def test_tokens_are_drawn_as_on_a_cpu() -> None:
    logits = torch.randn(256, 128_256) * 3
    rows = [SamplingRow(SamplingParams(temperature=(0.5, 1.0, 2.0)[i % 3]), i, 0, i) for i in range(256)]
    temperatures = torch.tensor([row.params.temperature for row in rows])
    drawn = draw_tokens(logits.cuda(), temperatures.cuda(), rng_states(rows, torch.device("cuda"))).cpu()
    # Rounding differs: of two as good as equal either may win.
    assert int((drawn != draw(logits, rows)).sum()) <= 1


@pytest.mark.parametrize("spread", [0.02, 3.0, 10.0])
def test_tokens_left_by_truncation_are_drawn_as_on_a_cpu(spread: float) -> None:
    """Nearly all of a vocabulary as likely as another; a few; one or two."""
    logits = torch.randn(256, 128_256) * spread
    kinds: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.8}]
    rows = [SamplingRow(SamplingParams(temperature=(0.6, 1.0)[i % 2], **kinds[i % 4]), i, 0, i) for i in range(256)]
    drawn = draw(logits.cuda(), rows).cpu()
    assert int((drawn != draw(logits, rows)).sum()) <= 2
