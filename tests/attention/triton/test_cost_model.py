"""What the cost model decides for a GPU of 132 multiprocessors, as an H100 and an H200 have them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.attention_batches import Chunk, Table, query_batch

from radixkv.attention import Planner
from radixkv.attention.triton import cost_model
from radixkv.attention.triton.cost_model import (
    MAX_LEVELS,
    PROGRAMS_PER_MULTIPROCESSOR,
    Tiling,
    decode_tiling,
    max_partials,
    max_tiles,
    num_pieces,
    sharing_rule,
    widest_tile,
)
from radixkv.memory import LayerShape
from radixkv_kernels.target import Target

KV_HEADS, GROUP, MULTIPROCESSORS = 8, 4, 132


def planned(chunks: list[Chunk]) -> list[tuple[int, int]]:
    """For each shared prefix, how many keys and rows it has."""
    rule = sharing_rule(GROUP, torch.bfloat16, torch.bfloat16, 2**20)
    ranges = Planner(len(chunks), 1000, 16, rule).plan(query_batch(chunks)).ranges
    keys, rows = ranges.key_stop - ranges.key_start, ranges.row_stop - ranges.row_start
    return [(int(keys[i]), int(rows[i])) for i in range(ranges.num_shared)]


def sharers(count: int, prefix: int, num_new: int) -> list[Chunk]:
    """Sequences that share that many tokens, followed by new tokens only."""
    blocks = -(-num_new // 16)
    return [
        Chunk(Table([*range(prefix // 16), *range(1000 * (i + 1), 1000 * (i + 1) + blocks)]), prefix, num_new)
        for i in range(count)
    ]


@pytest.mark.parametrize("num_sequences", range(1, 100))
def test_the_last_program_ends_soon_after_the_others_could(num_sequences: int) -> None:
    """50 whole sequences would be 400 programs where 396 run at once: two waves for the work of one."""
    keys = np.full(num_sequences, 4096)
    ones = np.ones_like(keys)
    pieces = num_pieces(keys, ones, keys, KV_HEADS, 0 * keys, Tiling(MULTIPROCESSORS))
    num_concurrent = MULTIPROCESSORS * PROGRAMS_PER_MULTIPROCESSOR[16]
    waves = np.ceil(KV_HEADS * pieces.sum() / num_concurrent)
    # No piece has fewer than 256 keys, so that one sequence alone fills a third of the device.
    ideal = max(num_sequences * KV_HEADS * 4096 / num_concurrent, 256)
    assert waves * 4096 / pieces.max() <= 1.3 * ideal


def test_prompts_share_what_saves_more_than_their_partial_results_cost() -> None:
    """Tiles of a long prompt are full: whether or not its sequences share a prefix, the same number of tiles read it."""
    assert planned(sharers(16, 32, 512)) == []
    assert planned(sharers(16, 2048, 512)) == []
    assert planned(sharers(16, 6144, 512)) == []
    assert planned(sharers(2, 16, 2)) == []
    assert planned(sharers(16, 2048, 8)) == [(2048, 128)]
    assert planned(sharers(16, 2048, 1)) == [(2048, 16)]


def test_tiles_that_would_spill_are_not_taken() -> None:
    for arch, dim, widest in (
        (80, 128, 128),
        (80, 256, 64),
        (89, 192, 64),
        (90, 256, 128),
        (100, 256, 128),
        (120, 256, 64),
    ):
        target = Target(arch, 99 * 1024)
        assert widest_tile([LayerShape(8, 64, 64), LayerShape(8, dim, 128)], target) == widest
        tiling = Tiling(1, widest_tile=widest)
        assert max(max_tiles(100, GROUP, torch.bfloat16, tiling)) == widest
        assert max(max_tiles(100, 100, torch.bfloat16, tiling)) == 128  # or the group would not fit


def test_decoding_is_tiled_for_the_gpu_and_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is measured with the same tiles that a backend takes: without `widest_tile`, with wider ones."""
    monkeypatch.setattr(cost_model, "current_target", lambda: Target(89, 99 * 1024))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    )
    tiling = decode_tiling(torch.device("cuda"), [LayerShape(8, 256, 256)])
    assert tiling == Tiling(MULTIPROCESSORS, one_class=True, widest_tile=64)
    assert decode_tiling(torch.device("cpu"), [LayerShape(8, 256, 256)]) == Tiling(1, one_class=True)


def test_rows_have_a_bounded_number_of_partial_results() -> None:
    """However deep the tree is: of ten sequences, each shares 500 tokens more with those after it."""
    chunks = []
    for i in range(10):
        path = [*range(32 * i), 10_000 + i]
        chunks.append(Chunk(Table(path), 16 * len(path) - 1, 1))
    shared = planned(chunks)
    assert len(shared) == MAX_LEVELS
    tiles = max_tiles(10, GROUP, torch.bfloat16, Tiling(1))
    assert max_partials(10, tiles, GROUP, KV_HEADS, Tiling(1)) >= 10 * (MAX_LEVELS + 1)
