"""The kernels that an engine launches are, as compiled, those that its start check has run; nothing is compiled here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.attention_batches import Chunk, Table, query_batch
from support.compiled_kernels import pretended_gpu
from triton.runtime.driver import driver

from radixkv.attention import AttentionLayer, AttentionOptions, NewTokens
from radixkv.attention.triton import TritonBackend, cost_model
from radixkv.attention.triton.launches import PartialResults
from radixkv.attention.triton.padded_decode import PaddedDecode
from radixkv.attention.triton.start_check import check_kernels
from radixkv.bench.gpu.layer import Attends
from radixkv.memory import KVPool, LayerShape
from radixkv_kernels import draw_tokens, draw_truncated

BLOCK_SIZE, BLOCKS_EACH, VOCAB_SIZE = 16, 40, 128_256

# For each kernel's name, what Triton compiles it for: types, alignments and constants of its arguments.
Specialisations = defaultdict[str, set[str]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Specialisations]:
    """Pretended CUDA."""
    specialisations: Specialisations = defaultdict(set)

    class Compiled:
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *arguments: None

    def run(kernel: Any, *args: object, grid: tuple[int, ...], warmup: bool, **options: Any) -> Compiled:
        *_, bind = kernel.device_caches[driver.active.get_current_device()]
        _, specialisation, compile_options = bind(*args, **options)
        specialisations[kernel.fn.__name__].add(f"{specialisation} {compile_options}")
        return Compiled()

    # Small batches share.
    monkeypatch.setattr(cost_model, "MIN_SAVED_BYTES", 1024)
    with pretended_gpu(run):
        yield specialisations


def attend(batch: Attends, rows: int, shape: LayerShape, num_query_heads: int, rotates: bool) -> None:
    """A layer with queries, keys and values that come out of one product."""
    heads = (num_query_heads, shape.num_kv_heads, shape.num_kv_heads)
    product = torch.zeros(1, rows, sum(heads), shape.key_dim, dtype=torch.bfloat16)
    query, key, value = (part.transpose(1, 2) for part in product.split(heads, dim=2))
    rotary = None
    if rotates:
        cosines, sines = torch.zeros(2, rows, shape.key_dim, dtype=torch.bfloat16)
        rotary = cosines, sines
    batch.attend(0, NewTokens(query, key, value, rotary), AttentionOptions(0.1))


@pytest.mark.parametrize("rotates", [True, False], ids=["rotated by the kernel", "rotated before"])
@pytest.mark.parametrize(("num_query_heads", "num_kv_heads", "dim"), [(32, 8, 128), (14, 2, 64)])
@pytest.mark.parametrize(("max_num_seqs", "max_model_len"), [(256, 8192), (10, 1000)])
def test_what_an_engine_launches_has_been_checked(
    rotates: bool,
    num_query_heads: int,
    num_kv_heads: int,
    dim: int,
    max_num_seqs: int,
    max_model_len: int,
    launched: Specialisations,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = LayerShape(num_kv_heads, dim, dim)
    layer = AttentionLayer(shape, num_query_heads, AttentionOptions(0.1), dim if rotates else None)
    monkeypatch.setattr("radixkv.attention.triton.start_check._run", lambda name, work, bound: list(work()))
    check_kernels([layer], BLOCK_SIZE, torch.bfloat16, torch.bfloat16, "cpu", VOCAB_SIZE)
    checked = {name: set(found) for name, found in launched.items()}
    launched.clear()

    pool = KVPool([shape], 500, BLOCK_SIZE, torch.bfloat16)
    backend = TritonBackend(pool, torch.bfloat16, num_query_heads, max_num_seqs, max_model_len, multiprocessors=132)
    is_flat = []
    for shared_blocks, num_new, count in ((4, 1, 8), (0, 1, 3), (0, 1, 1), (2, 30, 3), (2, 500, 2)):
        tables = [
            Table([*range(shared_blocks), *range(20 + BLOCKS_EACH * own, 20 + BLOCKS_EACH * (own + 1))])
            for own in range(count)
        ]
        batch = backend.prepare(query_batch([Chunk(table, 16 * shared_blocks + 3, num_new) for table in tables]))
        is_flat.append(batch.plan.is_flat)
        attend(batch, num_new * count, shape, num_query_heads, rotates)
    assert is_flat == [False, True, True, False, False]
    for rows in (1, 8):
        for wide in (False, True):
            padded = PaddedDecode(rows, backend, wide, PartialResults(torch.device("cpu")))
            attend(padded, rows, shape, num_query_heads, rotates)
    drawn = torch.zeros(7, VOCAB_SIZE), torch.ones(7), torch.zeros(7, dtype=torch.int64)
    draw_tokens(*drawn)
    draw_truncated(*drawn, min_p=torch.zeros(7), top_k=torch.ones(7, dtype=torch.int32), top_p=torch.ones(7))
    write = "_rotate_and_write" if rotates else "_write_cache"
    draws = {"_draw_block", "_draw_id", "_draw_candidate"}
    draws |= {"_weigh_blocks", "_find_bound", "_count_candidates", "_write_candidates"}
    assert {*launched} == {write, "_attend_items", "_attend_split", "_merge", *draws}
    assert len(launched["_attend_items"]) == 3  # of 16, 64 and 128 rows
    for name, found in launched.items():
        assert found <= checked[name], name
