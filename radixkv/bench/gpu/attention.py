"""One layer's attention, cache writes, block copies and token sampling on a GPU, against the bytes and operations they need.

Every row is timed as a replayed CUDA graph, with none of its data in the L2 cache. Its floor is the bytes that it must move
over the bandwidth that this GPU has just shown in reading or copying, or its operations over the matrix rate; `ratio` is
floor over time. An attention row includes writing the batch's new keys and values. Rows "as graphs decode" do what the
engine's CUDA graphs do: they use work items even where nothing is shared, and grids large enough for other batches, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from rich.console import Console
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from radixkv.attention import QueryBatch
from radixkv.bench.common.tables import figure_table
from radixkv.bench.gpu.layer import (
    BLOCK_SIZE,
    DIM,
    HEADS,
    KV_HEADS,
    TOKEN_BYTES,
    Level,
    layer_work,
    make_pool,
    max_tokens,
    tree_batch,
)
from radixkv.bench.gpu.report import GpuReport
from radixkv.bench.gpu.targets import AS_GRAPHS, FLAT, LEVELS, PREFILL, PREFILL_PEERS, SHARED
from radixkv.bench.gpu.timing import Limits, median_seconds
from radixkv.bench.gpu.torch_attention import require_backend
from radixkv.memory import KVPool
from radixkv.memory.fp8_kv_pool import FP8

PREFILLS, NEW, CACHED = 4, 2048, 6144
BLOCKS = 4096
DRAWN, VOCABULARY = 256, 128_256
BLOCKS_NBYTES = BLOCKS * BLOCK_SIZE * TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Row:
    """One measured piece of work.

    Attributes:
        bytes: how many must be moved.
        floor_us: the least time that these take, or the operations where those take longer.
        ratio: floor over time.
    """

    bytes: int
    floor_us: float
    median_us: float
    ratio: float


def make_row(moved: int, floor_s: float, seconds: float) -> Row:
    return Row(moved, floor_s * 1e6, seconds * 1e6, floor_s / seconds)


def attention_row(
    batch: int,
    levels: list[Level],
    limits: Limits,
    dtype: torch.dtype = torch.bfloat16,
    in_graphs: bool = False,
    layers: int = 1,
    shuffled: bool = True,
) -> Row:
    """Decoding: one new token per sequence.

    Args:
        dtype: of stored keys and values.
        in_graphs: as graphs decode.
        layers: how many run in one graph, one after the other, each with its own keys and values; the row is about one.
        shuffled: blocks are scattered over the pool; otherwise each sequence's are contiguous.
    """
    tree, num_blocks, tokens = tree_batch(batch, levels, 1, shuffled=shuffled)
    pool = make_pool(num_blocks, dtype, "cuda", layers)
    seconds = median_seconds(_attend(tree, pool, batch, in_graphs)) / layers
    moved = tokens * pool.block_nbytes // layers // BLOCK_SIZE
    return make_row(moved, moved / limits.read_bytes_per_s, seconds)


def _attend(batch: QueryBatch, pool: KVPool, rows: int, in_graphs: bool = False) -> Callable[[], object]:
    # Triton is installed only where there is a GPU.
    from radixkv.attention.triton import TritonBackend
    from radixkv.attention.triton.cost_model import whole_from
    from radixkv.attention.triton.launches import PartialResults
    from radixkv.attention.triton.padded_decode import PaddedDecode
    from radixkv.attention.triton.work_items import HeadShape

    backend = TritonBackend(pool, torch.bfloat16, HEADS, len(batch.tables), max_tokens(batch))
    prepared = backend.prepare(batch)
    if not in_graphs:
        return layer_work(prepared, rows, len(pool.layers))
    flat = prepared.plan.is_flat
    whole = flat and rows >= whole_from(KV_HEADS, backend.tiling)
    padded = PaddedDecode(rows, backend, not flat, PartialResults(pool.keys[0].device), whole)
    padded.items(HeadShape(KV_HEADS, HEADS // KV_HEADS))
    assert padded.load(prepared)
    return layer_work(padded, rows, len(pool.layers))


def prefill_row(limits: Limits) -> Row:
    """4 prompts of 2,048 new tokens over 6,144 cached."""
    batch, num_blocks, _ = tree_batch(PREFILLS, [Level(PREFILLS, CACHED)], NEW)
    return _prefill(limits, _attend(batch, make_pool(num_blocks, torch.bfloat16, "cuda"), PREFILLS * NEW))


def flash_prefill_row(limits: Limits) -> Row:
    """The same problem with contiguous keys and values, by torch's flash attention or, without it, unavailable."""
    from torch.nn.attention.bias import causal_lower_right

    query, key, value = _contiguous_prefill()
    mask = causal_lower_right(NEW, CACHED + NEW)
    attend = partial(functional.scaled_dot_product_attention, query, key, value, mask, enable_gqa=True)
    return _prefill_by(SDPBackend.FLASH_ATTENTION, limits, attend)


def cudnn_prefill_row(limits: Limits) -> Row:
    """The same by cuDNN's attention or, without it, unavailable.

    In two calls whose results are not merged, over the cached keys and causally over the new ones, because torch gives cuDNN
    no causal mask for more keys than queries.
    """
    query, key, value = _contiguous_prefill()
    cached_key, cached_value = (tensor[:, :, :CACHED].contiguous() for tensor in (key, value))
    new_key, new_value = (tensor[:, :, CACHED:].contiguous() for tensor in (key, value))

    def attend() -> None:
        functional.scaled_dot_product_attention(query, cached_key, cached_value, enable_gqa=True)
        functional.scaled_dot_product_attention(query, new_key, new_value, is_causal=True, enable_gqa=True)

    return _prefill_by(SDPBackend.CUDNN_ATTENTION, limits, attend)


def _prefill_by(backend: SDPBackend, limits: Limits, attend: Callable[[], object]) -> Row:
    with sdpa_kernel(backend):
        require_backend(backend, attend)
        return _prefill(limits, attend)


def _contiguous_prefill() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query = torch.randn(PREFILLS, HEADS, NEW, DIM, dtype=torch.bfloat16, device="cuda")
    shape = (PREFILLS, KV_HEADS, CACHED + NEW, DIM)
    key, value = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return query, key, value


def _prefill(limits: Limits, work: Callable[[], object]) -> Row:
    moved = PREFILLS * (CACHED + NEW) * TOKEN_BYTES
    operations = 4 * PREFILLS * HEADS * DIM * NEW * (CACHED + NEW / 2)
    return make_row(moved, operations / limits.bf16_flops, median_seconds(work))


def _caches() -> list[torch.Tensor]:
    shape = (2 * BLOCKS, BLOCK_SIZE, KV_HEADS, DIM)
    return [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]


def copy_row(limits: Limits) -> Row:
    """Copying 4,096 blocks to as many others, in one launch."""
    from radixkv_kernels import BlockCopier

    copier = BlockCopier(_caches())
    ids = np.random.default_rng(0).permutation(2 * BLOCKS).tolist()
    copies = [(a, b, BLOCK_SIZE) for a, b in zip(ids[:BLOCKS], ids[BLOCKS:], strict=True)]
    table = torch.tensor(copies, dtype=torch.int32, device="cuda")
    seconds = median_seconds(lambda: copier.launch(table))
    return make_row(2 * BLOCKS_NBYTES, 2 * BLOCKS_NBYTES / limits.bytes_per_s, seconds)


def write_row(limits: Limits) -> Row:
    """Writing the tokens of 4,096 blocks into scattered slots."""
    from radixkv_kernels import write_cache

    tokens = BLOCKS * BLOCK_SIZE
    keys, values = _caches()
    key, value = (torch.randn(tokens, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    slots = torch.randperm(2 * tokens, device="cuda")[:tokens]
    seconds = median_seconds(lambda: write_cache(key, value, keys, values, slots))
    return make_row(2 * BLOCKS_NBYTES, 2 * BLOCKS_NBYTES / limits.bytes_per_s, seconds)


def draw_row(limits: Limits) -> Row:
    """Sampling a token for each of 256 sequences from Llama 3's whole vocabulary."""
    from radixkv_kernels import draw_tokens

    logits = torch.randn(DRAWN, VOCABULARY, device="cuda")
    temperatures, rng_states = torch.ones(DRAWN, device="cuda"), torch.arange(DRAWN, device="cuda")
    seconds = median_seconds(lambda: draw_tokens(logits, temperatures, rng_states))
    return make_row(logits.nbytes, logits.nbytes / limits.read_bytes_per_s, seconds)


def truncated_draw_row(spread: float, limits: Limits, *, top_k: int, top_p: float) -> Row:
    """The same from normal logits of a given spread, truncated by top-k and top-p."""
    from radixkv_kernels import draw_truncated

    logits = torch.randn(DRAWN, VOCABULARY, device="cuda") * spread
    ones, rng_states = torch.ones(DRAWN, device="cuda"), torch.arange(DRAWN, device="cuda")
    left = {"min_p": 0.0 * ones, "top_k": (top_k * ones).int(), "top_p": top_p * ones}
    seconds = median_seconds(lambda: draw_truncated(logits, ones, rng_states, **left))
    return make_row(logits.nbytes, logits.nbytes / limits.read_bytes_per_s, seconds)


# A prefix of 3,500 tokens is shared in whole blocks of 16: 3,488. Each sequence has the rest to itself.
DECODING = MappingProxyType(
    {
        **{
            f"flat {batch} x {length:,}": (batch, [Level(batch, length)])
            for batch, length in [(256, 4096), *((b, n) for b in (1, 8, 64) for n in (1024, 16_384, 65_536))]
        },
        SHARED: (256, [Level(1, 3488), Level(256, 608)]),
        LEVELS: (256, [Level(1, 2048), Level(8, 1792), Level(256, 256)]),
    }
)
IN_GRAPHS = (FLAT, "flat 8 x 16,384", SHARED, LEVELS)
# Each layer's keys and values push those of the one before out of the L2 cache, as in a model.
EIGHT_LAYERS = (FLAT, SHARED)


def run_attention(console: Console, json_path: Path | None, only: str | None = None, resume: bool = False) -> bool:
    """Measure, print a table, and write the rows; a row that fails is noted, and the others are measured all the same.

    Args:
        only: rows whose name contains this.
        resume: keep the rows that are in the file, and measure the others.

    Returns:
        Whether no row failed.

    Raises:
        ValueError: there is no GPU, or no row's name contains ``only``.
    """
    report = GpuReport.begin(console, json_path, only, resume)
    work: dict[str, Callable[[Limits], Row]] = {
        **{name: partial(attention_row, batch, levels) for name, (batch, levels) in DECODING.items()},
        **{f"{name}{AS_GRAPHS}": partial(attention_row, *DECODING[name], in_graphs=True) for name in IN_GRAPHS},
        **{f"{name}, 8 layers": partial(attention_row, *DECODING[name], layers=8) for name in EIGHT_LAYERS},
        **{
            f"{name}, blocks in order": partial(attention_row, *DECODING[name], shuffled=False) for name in EIGHT_LAYERS
        },
        # Needs compute capability 8.9; below that, the row says so.
        f"{FLAT}, float8": partial(attention_row, *DECODING[FLAT], dtype=FP8),
        PREFILL: prefill_row,
        **dict(zip(PREFILL_PEERS, (flash_prefill_row, cudnn_prefill_row), strict=True)),
        "copy 4,096 blocks": copy_row,
        "write 65,536 tokens": write_row,
        "draw 256 tokens of 128,256": draw_row,
        "the same, of 20 at most that make up 0.8": partial(truncated_draw_row, 3.0, top_k=20, top_p=0.8),
        "the same, of a flat distribution's 0.9": partial(truncated_draw_row, 0.02, top_k=VOCABULARY, top_p=0.9),
    }
    table = figure_table("work", "MB", "floor us", "median us", "floor / time")
    for name, measure in work.items():
        row = report.measure(name, partial(measure, report.limits))
        if row is not None:
            table.add_row(
                name, f"{row.bytes / 1e6:,.0f}", f"{row.floor_us:.1f}", f"{row.median_us:.1f}", f"{row.ratio:.2f}"
            )
    limits = report.limits
    return report.end(table, limits.in_words())
