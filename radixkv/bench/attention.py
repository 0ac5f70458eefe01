"""One layer's attention, cache writes and block copies on a GPU, against the bytes and operations that they must cost.

Every row is timed as a replayed CUDA graph with a cold L2 cache. Its floor is what the row must move over the copy bandwidth
that this GPU has just shown, or what it must multiply over its matrix rate; `ratio` is floor over time. A row of attention
includes writing the batch's new keys and values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from radixkv.attention import QueryChunk
from radixkv.bench.gpu_timing import Limits, describe_gpu, measure_limits, median_seconds, require_gpu
from radixkv.memory import KVPool, LayerShape

HEADS, KV_HEADS, DIM = 32, 8, 128
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Row:
    """One measured piece of work."""

    name: str
    bytes: int
    floor_us: float
    median_us: float
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.floor_us / self.median_us


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


def attention_row(name: str, batch: int, levels: list[Level], limits: Limits, note: str = "") -> Row:
    """Decoding: one new token a sequence."""
    chunks, num_blocks, tokens = tree_chunks(batch, levels, 1)
    seconds = median_seconds(_attend(chunks, num_blocks, batch))
    moved = tokens * TOKEN_BYTES
    return Row(name, moved, moved / limits.bytes_per_s * 1e6, seconds * 1e6, note)


def _attend(chunks: list[QueryChunk], num_blocks: int, rows: int) -> Callable[[], object]:
    from radixkv.attention.triton_backend import TritonBackend  # Triton is there with a GPU only

    pool = KVPool([LayerShape(KV_HEADS, DIM, DIM)], num_blocks, BLOCK_SIZE, torch.bfloat16, "cuda")
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_()
    longest = max(len(chunk.block_ids) for chunk in chunks) * BLOCK_SIZE
    batch = TritonBackend(pool, torch.bfloat16, HEADS, len(chunks), longest).prepare(chunks)
    query = torch.randn(1, HEADS, rows, DIM, dtype=torch.bfloat16, device="cuda")
    key, value = (torch.randn(1, KV_HEADS, rows, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return lambda: batch.attend(0, query, key, value, scale=DIM**-0.5)


def prefill_row(limits: Limits) -> Row:
    """4 prompts of 2,048 new tokens over 6,144 cached, against torch's flash attention on the same contiguous problem."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    batch, new, cached = 4, 2048, 6144
    chunks, num_blocks, tokens = tree_chunks(batch, [Level(batch, cached)], new)
    seconds = median_seconds(_attend(chunks, num_blocks, batch * new))
    query = torch.randn(batch, HEADS, new, DIM, dtype=torch.bfloat16, device="cuda")
    key, value = (
        torch.randn(batch, KV_HEADS, cached + new, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2)
    )
    mask = causal_lower_right(new, cached + new)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = median_seconds(
            lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        )
    operations = 4 * batch * HEADS * DIM * new * (cached + new / 2)
    note = f"torch's flash attention {theirs * 1e6:.0f} us: {theirs / seconds:.2f} of its speed"
    return Row(
        "prefill 4 x 2,048 over 6,144", tokens * TOKEN_BYTES, operations / limits.bf16_flops * 1e6, seconds * 1e6, note
    )


def memory_rows(limits: Limits) -> Iterator[Row]:
    """Copying and writing 4,096 blocks."""
    from radixkv_kernels import BlockCopier, write_cache

    blocks = 4096
    shape = (2 * blocks, BLOCK_SIZE, KV_HEADS, DIM)
    keys, values = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    copier = BlockCopier([keys, values])
    places = np.random.default_rng(0).permutation(2 * blocks).tolist()
    copies = [(a, b, BLOCK_SIZE) for a, b in zip(places[:blocks], places[blocks:], strict=True)]
    moved = 2 * blocks * BLOCK_SIZE * TOKEN_BYTES
    table = torch.tensor(copies, dtype=torch.int32, device="cuda")
    seconds = median_seconds(lambda: copier.launch(table))
    yield Row("copy 4,096 blocks", moved, moved / limits.bytes_per_s * 1e6, seconds * 1e6)

    tokens = blocks * BLOCK_SIZE
    key, value = (torch.randn(KV_HEADS, tokens, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    slots = torch.randperm(2 * tokens, device="cuda")[:tokens]
    seconds = median_seconds(lambda: write_cache(key.transpose(0, 1), value.transpose(0, 1), keys, values, slots))
    yield Row("write 65,536 tokens", moved, moved / limits.bytes_per_s * 1e6, seconds * 1e6)


def run_attention(console: Console, json_path: Path | None) -> None:
    """Measure, print a table, and write the rows.

    Raises:
        ValueError: there is no GPU.
    """
    require_gpu()
    limits = measure_limits()
    decoding = [
        (f"flat {batch} x {length:,}", batch, [Level(batch, length)], "")
        for batch, length in [(256, 4096), *((b, n) for b in (1, 8, 64) for n in (1024, 16_384, 65_536))]
    ]
    shared = [
        ("256 x 4,096, 3,504 shared", 256, [Level(1, 3504), Level(256, 592)], "1,000 us if every one read all"),
        (
            "256 in three levels",
            256,
            [Level(1, 2048), Level(8, 1792), Level(256, 256)],
            "2,048 by all, 8 x 1,792, 256 x 256",
        ),
    ]
    rows = [
        attention_row(name, batch, levels, limits, note)
        for name, batch, levels, note in track(decoding + shared, "decoding", console=console)
    ]
    rows += [prefill_row(limits), *memory_rows(limits)]
    table = Table("work", "MB", "floor us", "median us", "floor / time", "")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.bytes / 1e6:,.0f}",
            f"{row.floor_us:.1f}",
            f"{row.median_us:.1f}",
            f"{row.ratio:.2f}",
            row.note,
        )
    console.print(table)
    console.print(f"copy {limits.bytes_per_s / 1e12:.2f} TB/s, bfloat16 {limits.bf16_flops / 1e12:.0f} TFLOP/s")
    if json_path:
        content = {
            "machine": describe_gpu(),
            "limits": asdict(limits),
            "rows": [{**asdict(row), "ratio": row.ratio} for row in rows],
        }
        json_path.write_text(json.dumps(content, indent=2) + "\n")
