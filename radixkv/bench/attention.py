"""One layer's attention, cache writes, block copies and draws of tokens on a GPU, against what they must move and multiply.

Every row is timed as a replayed CUDA graph with nothing of it in the L2 cache. Its floor is what the row must move over the
copy bandwidth that this GPU has just shown, or what it must multiply over its matrix rate; `ratio` is floor over time. A row
of attention includes writing the batch's new keys and values. Rows "as graphs decode" take the way of the engine's CUDA
graphs: work items also where nothing is shared, and launches with room for other batches than this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from radixkv.attention import QueryChunk
from radixkv.bench.gpu_report import GpuReport
from radixkv.bench.gpu_timing import Limits, describe_gpu, measure_limits, median_seconds, require_gpu
from radixkv.memory import KVPool, LayerShape
from radixkv.memory.fp8_kv_pool import FP8, Fp8KVPool, KVScales

HEADS, KV_HEADS, DIM = 32, 8, 128
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2
BLOCK_SIZE = 16
PREFILLS, NEW, CACHED = 4, 2048, 6144
BLOCKS = 4096
BLOCKS_NBYTES = BLOCKS * BLOCK_SIZE * TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Row:
    """One measured piece of work.

    Attributes:
        bytes: that must be moved.
        floor_us: the time that these take, or the operations where they take longer.
        ratio: floor over time.
    """

    bytes: int
    floor_us: float
    median_us: float
    ratio: float


def make_row(moved: int, floor_s: float, seconds: float) -> Row:
    return Row(moved, floor_s * 1e6, seconds * 1e6, floor_s / seconds)


@dataclass(frozen=True, slots=True)
class Level:
    """``groups`` nodes of ``tokens`` each, every one shared by an equal part of the batch."""

    groups: int
    tokens: int


def tree_chunks(batch: int, levels: list[Level], num_new: int, seed: int = 0) -> tuple[list[QueryChunk], int, int]:
    """A batch over shuffled blocks: each sequence passes through one node of every level, then has its new tokens.

    Returns:
        The chunks, the blocks that they take together, and how many different tokens lie in them.
    """
    counts = [-(-level.tokens // BLOCK_SIZE) * level.groups for level in levels]
    fresh = -(-num_new // BLOCK_SIZE) + 1
    total = sum(counts) + batch * fresh
    ids = np.random.default_rng(seed).permutation(total).astype(np.int32)
    starts = np.concatenate(([0], np.cumsum(counts)))
    chunks = []
    for row in range(batch):
        parts = []
        for level, start in zip(levels, starts, strict=False):
            blocks = -(-level.tokens // BLOCK_SIZE)
            node = start + row * level.groups // batch * blocks
            parts.append(ids[node : node + blocks])
        own = sum(counts) + row * fresh
        parts.append(ids[own : own + fresh])
        context = sum(level.tokens for level in levels)
        chunks.append(QueryChunk(np.concatenate(parts), context, num_new, owner=row))
    return chunks, total, sum(level.groups * level.tokens for level in levels) + batch * num_new


def make_pool(num_blocks: int, dtype: torch.dtype, device: str) -> KVPool:
    """One layer of random keys and values; float8 has a scale for each head."""
    layers = [LayerShape(KV_HEADS, DIM, DIM)]
    if dtype != FP8:
        pool = KVPool(layers, num_blocks, BLOCK_SIZE, dtype, device)
        for tensor in (*pool.keys, *pool.values):
            tensor.normal_()
        return pool
    scales = KVScales([torch.full((KV_HEADS,), 0.5)], [torch.full((KV_HEADS,), 2.0)])
    pool = Fp8KVPool(layers, num_blocks, BLOCK_SIZE, scales, torch.bfloat16, device)
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(torch.randn(tensor.shape, dtype=torch.bfloat16, device=device))
    return pool


def attention_row(
    batch: int, levels: list[Level], limits: Limits, dtype: torch.dtype = torch.bfloat16, in_graphs: bool = False
) -> Row:
    """Decoding: one new token a sequence.

    Args:
        dtype: of stored keys and values.
        in_graphs: as graphs decode.
    """
    chunks, num_blocks, tokens = tree_chunks(batch, levels, 1)
    pool = make_pool(num_blocks, dtype, "cuda")
    seconds = median_seconds(_attend(chunks, pool, batch, in_graphs))
    moved = tokens * pool.block_nbytes // BLOCK_SIZE
    return make_row(moved, moved / limits.bytes_per_s, seconds)


def _attend(chunks: list[QueryChunk], pool: KVPool, rows: int, in_graphs: bool = False) -> Callable[[], object]:
    # Triton is there with a GPU only.
    from radixkv.attention.padded_decode import PaddedDecode
    from radixkv.attention.triton_backend import PartialResults, TritonBackend

    longest = max(len(chunk.block_ids) for chunk in chunks) * BLOCK_SIZE
    batch = TritonBackend(pool, torch.bfloat16, HEADS, len(chunks), longest).prepare(chunks)
    attend = batch.attend
    if in_graphs:
        plan = batch.plan
        padded = PaddedDecode(rows, pool, plan.buffers, plan.is_flat, PartialResults(pool.keys[0].device))
        assert padded.load(plan)
        attend = padded.attend
    return layer_work(attend, rows)


def layer_work(attend: Callable[..., object], rows: int) -> Callable[[], object]:
    """Attention of one layer to random queries, keys and values for so many rows, by ``AttentionBatch.attend``."""
    query = torch.randn(1, HEADS, rows, DIM, dtype=torch.bfloat16, device="cuda")
    key, value = (torch.randn(1, KV_HEADS, rows, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return lambda: attend(0, query, key, value, scale=DIM**-0.5)


def prefill_row(limits: Limits) -> Row:
    """4 prompts of 2,048 new tokens over 6,144 cached."""
    chunks, num_blocks, _ = tree_chunks(PREFILLS, [Level(PREFILLS, CACHED)], NEW)
    return _prefill(limits, _attend(chunks, make_pool(num_blocks, torch.bfloat16, "cuda"), PREFILLS * NEW))


def torch_prefill_row(limits: Limits) -> Row:
    """The same problem, its keys and values contiguous, for torch's flash attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    query = torch.randn(PREFILLS, HEADS, NEW, DIM, dtype=torch.bfloat16, device="cuda")
    key, value = (
        torch.randn(PREFILLS, KV_HEADS, CACHED + NEW, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2)
    )
    mask = causal_lower_right(NEW, CACHED + NEW)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, query, key, value, mask, enable_gqa=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _prefill(limits, attend)


def _prefill(limits: Limits, work: Callable[[], object]) -> Row:
    moved = PREFILLS * (CACHED + NEW) * TOKEN_BYTES
    operations = 4 * PREFILLS * HEADS * DIM * NEW * (CACHED + NEW / 2)
    return make_row(moved, operations / limits.bf16_flops, median_seconds(work))


def _caches() -> list[torch.Tensor]:
    shape = (2 * BLOCKS, BLOCK_SIZE, KV_HEADS, DIM)
    return [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]


def copy_row(limits: Limits) -> Row:
    """Copying 4,096 blocks, as many as are read in one launch."""
    from radixkv_kernels import BlockCopier

    copier = BlockCopier(_caches())
    places = np.random.default_rng(0).permutation(2 * BLOCKS).tolist()
    copies = [(a, b, BLOCK_SIZE) for a, b in zip(places[:BLOCKS], places[BLOCKS:], strict=True)]
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

    rows, vocabulary = 256, 128_256
    logits = torch.randn(rows, vocabulary, device="cuda")
    temperatures, starts = torch.ones(rows, device="cuda"), torch.arange(rows, device="cuda")
    seconds = median_seconds(lambda: draw_tokens(logits, temperatures, starts))
    return make_row(logits.nbytes, logits.nbytes / limits.bytes_per_s, seconds)


# A prefix of 3,500 tokens is shared in whole blocks of 16: 3,488. The rest each sequence has to itself.
DECODING = {
    **{
        f"flat {batch} x {length:,}": (batch, [Level(batch, length)])
        for batch, length in [(256, 4096), *((b, n) for b in (1, 8, 64) for n in (1024, 16_384, 65_536))]
    },
    "256 x 4,096, 3,500 shared": (256, [Level(1, 3488), Level(256, 608)]),
    "256: 2,048 by all, 1,792 by 32 each, 256 private": (256, [Level(1, 2048), Level(8, 1792), Level(256, 256)]),
}
IN_GRAPHS = ("flat 256 x 4,096", "flat 8 x 16,384", "256 x 4,096, 3,500 shared")


def run_attention(console: Console, json_path: Path | None, only: str | None = None) -> bool:
    """Measure, print a table, and write the rows; a row that fails is noted, and the others are measured all the same.

    Args:
        only: rows whose name contains this.

    Returns:
        Whether no row failed.

    Raises:
        ValueError: there is no GPU.
    """
    require_gpu()
    limits = measure_limits()
    report = GpuReport(console, json_path, describe_gpu(), limits, only)
    work: dict[str, Callable[[Limits], Row]] = {
        **{name: partial(attention_row, batch, levels) for name, (batch, levels) in DECODING.items()},
        **{f"{name}, as graphs decode": partial(attention_row, *DECODING[name], in_graphs=True) for name in IN_GRAPHS},
        # Not before compute capability 8.9, which the row then says.
        "flat 256 x 4,096, float8": partial(attention_row, *DECODING["flat 256 x 4,096"], dtype=FP8),
        "prefill 4 x 2,048 over 6,144": prefill_row,
        "the same by torch's flash attention": torch_prefill_row,
        "copy 4,096 blocks": copy_row,
        "write 65,536 tokens": write_row,
        "draw 256 tokens of 128,256": draw_row,
    }
    table = Table("work", "MB", "floor us", "median us", "floor / time")
    for name, measure in work.items():
        row = report.measure(name, partial(measure, limits))
        if row is not None:
            table.add_row(
                name, f"{row.bytes / 1e6:,.0f}", f"{row.floor_us:.1f}", f"{row.median_us:.1f}", f"{row.ratio:.2f}"
            )
    console.print(table)
    console.print(f"copy {limits.bytes_per_s / 1e12:.2f} TB/s, bfloat16 {limits.bf16_flops / 1e12:.0f} TFLOP/s")
    for name, error in report.failed.items():
        console.print(f"failed: {name}: {error}", markup=False)
    return not report.failed
