"""When decoding graphs are captured, what they keep, and which of them runs a batch. CUDA itself is simulated."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.attention_batches import Chunk, Table, query_batch, shared_chunks
from support.model_zoo import build_supported

from radixkv.attention.triton import TritonBackend, cost_model
from radixkv.attention.triton.buffers import padded_size
from radixkv.attention.triton.padded_decode import PaddedDecode
from radixkv.attention.triton.work_items import HeadShape
from radixkv.memory import KVPool, LayerShape
from radixkv.model.graphs.decode_graphs import MAX_CAPTURE_SECONDS, DecodeGraphs, GraphKind, kinds_in_order
from radixkv.model.loader import load_model
from radixkv.model.runner import ModelRunner

VOCABULARY = 50


def make_backend(max_num_seqs: int, max_model_len: int = 64, max_draft_rows: int = 0) -> TritonBackend:
    pool = KVPool([LayerShape(1, 4, 4)], 1, 16, torch.float32)
    return TritonBackend(
        pool, torch.float32, 1, max_num_seqs, max_model_len, multiprocessors=1, max_draft_rows=max_draft_rows
    )


class Model:
    """Gives token + 10 all the probability; remembers each batch's logits weakly."""

    def __init__(self) -> None:
        self.logits: list[weakref.ref[torch.Tensor]] = []

    def __call__(self, padded: PaddedDecode) -> torch.Tensor:
        logits = torch.nn.functional.one_hot(padded.token_ids[padded.logit_rows] + 10, VOCABULARY).float()
        self.logits.append(weakref.ref(logits))
        return logits


class Capture:
    """Does what others see `GraphCapture` do; the graph with the number ``fails_at`` does not fit into memory."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.num_captured = 0
        self.num_replayed = 0
        self._fails_at = fails_at

    def __call__(self, work: Callable[[], object]) -> Callable[[], object]:
        if self.num_captured == self._fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        work()
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            work()

        return replay


def decode(graphs: DecodeGraphs, backend: TritonBackend, tokens: list[int]) -> list[int] | None:
    """The tokens predicted after ``tokens``, for sequences whose blocks come in reverse order."""
    count = len(tokens)
    batch = backend.prepare(query_batch([Chunk(Table([100 - i]), 3, 1) for i in range(count)]))
    logits = graphs.run(torch.tensor(tokens)[batch.order], batch)
    return None if logits is None else logits.argmax(-1).tolist()


def test_all_graphs_are_captured_at_the_start_and_write_into_one_buffer() -> None:
    backend, model, capture = make_backend(40), Model(), Capture()
    graphs = DecodeGraphs(backend, model, 40, groups=[1], capture=capture)
    graphs.capture()
    assert capture.num_captured == graphs.num_captured == len(graphs.kinds)
    gc.collect()
    assert not any(logits() is not None for logits in model.logits)
    buffer = graphs._logits
    assert buffer is not None
    assert buffer.shape == (40, VOCABULARY)
    for count in (1, 3, 40, 2, 17):
        assert decode(graphs, backend, list(range(count))) == list(range(10, 10 + count))
    assert graphs._logits is buffer
    assert capture.num_captured == len(graphs.kinds)
    assert capture.num_replayed == 5


def test_logits_stay_valid_when_the_next_batch_is_launched() -> None:
    """Tokens are drawn from them after that."""
    backend = make_backend(4)
    graphs = DecodeGraphs(backend, Model(), 4, groups=[1], capture=Capture())
    graphs.capture()
    batches = [query_batch([Chunk(Table([i]), 3, 1)]) for i in range(2)]
    first = graphs.run(torch.tensor([1]), backend.prepare(batches[0]))
    second = graphs.run(torch.tensor([2]), backend.prepare(batches[1]))
    assert first is not None
    assert second is not None
    assert [first.argmax(), second.argmax()] == [11, 12]


def from_2(size: int) -> bool:
    """Batches of two rows or more may have wide tiles."""
    return size > 1


def test_sizes_of_most_use_come_first() -> None:
    sizes = list(dict.fromkeys(kind.size for kind in kinds_in_order(200, 0, from_2, 1000)))
    assert sizes[:9] == [224, 128, 64, 32, 16, 8, 4, 2, 1]
    assert sizes[9:12] == [192, 160, 112]
    assert kinds_in_order(1, 0, from_2, 2) == [GraphKind(1)]
    kinds = kinds_in_order(200, 0, from_2, 150)
    assert [kind for kind in kinds if kind.size < 3] == [GraphKind(2, wide=True), GraphKind(2), GraphKind(1)]
    # Last, for the others can stand in for them.
    assert kinds[-2:] == [GraphKind(192, whole=True), GraphKind(160, whole=True)]
    assert kinds[:2] == [GraphKind(224, wide=True), GraphKind(224)]


def test_with_drafts_there_are_a_few_larger_sizes() -> None:
    """The largest is the first."""
    kinds = kinds_in_order(64, 256, from_2, 1000)
    assert kinds[0] == GraphKind(320, wide=True)
    assert kinds[1:3] == [GraphKind(64, wide=True), GraphKind(64)]
    assert [kind.size for kind in kinds if kind.size > 64] == [320, 304, 240, 192, 144, 112, 80]
    assert max(kinds_in_order(64, 36, from_2, 1000)).size == 112


def test_a_batch_none_of_whose_rows_is_split_runs_without_a_merge() -> None:
    """And one with a split row runs in the graph of its size that merges."""
    backend, sizes = make_backend(16, max_model_len=2000), []

    def forward(padded: PaddedDecode) -> torch.Tensor:
        sizes.append((padded.num_rows, padded.whole, padded.items(HeadShape(1, 1)).num_partials > 0))
        return torch.zeros(padded.num_rows, VOCABULARY)

    graphs = DecodeGraphs(backend, forward, 16, groups=[1], capture=Capture())
    graphs.capture()
    tables = [Table(range(125)), *(Table([i]) for i in range(12))]
    for long, expected in ((False, (14, True, False)), (True, (14, False, True)), (False, (14, True, False))):
        sizes.clear()
        chunks = [Chunk(table, 1900 if long and number == 0 else 3, 1) for number, table in enumerate(tables)]
        assert graphs.run(torch.arange(13), backend.prepare(query_batch(chunks))) is not None
        assert sizes == [expected]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([(32, 16)], 16),  # each of two rows, whose eight heads fit the narrowest tile
        ([(4, 16)], 64),
        ([(1, 16), (8, 16)], 64),
        ([], 16),
    ],
)
def test_tiles_are_as_wide_as_the_batch_needs(
    nodes: list[tuple[int, int]], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 sequences below nodes of so many blocks, each with 32 heads in groups of 4."""
    monkeypatch.setattr(cost_model, "MIN_SAVED_BYTES", 0)
    pool = KVPool([LayerShape(8, 4, 4)], 1, 16, torch.bfloat16)
    backend = TritonBackend(pool, torch.bfloat16, 32, 64, 1600, multiprocessors=132)
    launched: list[tuple[int, ...]] = []

    def forward(padded: PaddedDecode) -> torch.Tensor:
        launched.append(tuple(padded.items(HeadShape(8, 4)).by_tile))
        return torch.zeros(padded.num_rows, VOCABULARY)

    graphs = DecodeGraphs(backend, forward, 64, groups=[4], capture=Capture())
    graphs.capture()
    launched.clear()
    batch = backend.prepare(query_batch(shared_chunks(64, nodes)))
    assert graphs.run(torch.zeros(64, dtype=torch.int64), batch) is not None
    assert launched == [(expected,)]
    # There are few of them, and each size has the one that takes any batch.
    assert len(graphs.kinds) <= len({kind.size for kind in graphs.kinds}) * 2 + 1


def test_where_only_graphs_of_wide_tiles_were_captured_all_batches_run_in_them() -> None:
    pool = KVPool([LayerShape(8, 4, 4)], 1, 16, torch.bfloat16)
    backend = TritonBackend(pool, torch.bfloat16, 32, 64, 1600, multiprocessors=132)
    graphs = DecodeGraphs(
        backend,
        lambda padded: padded.items(HeadShape(8, 4)).starts.new_zeros(padded.num_rows, VOCABULARY),
        64,
        groups=[4],
        capture=Capture(),
    )
    graphs.capture(graphs.kinds[:1])
    assert graphs.kinds[0] == GraphKind(64, wide=True)
    for count in (1, 5, 64):
        batch = backend.prepare(query_batch(shared_chunks(count, [])))
        assert batch.plan.is_flat
        assert graphs.run(torch.zeros(count, dtype=torch.int64), batch) is not None


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "classes"),
    [
        (torch.float32, 32, 8, {1: [16], 64: [16]}),
        (torch.bfloat16, 32, 8, {4: [16], 5: [64, 16], 64: [64, 16]}),
        # A group of 32 fills more than the narrowest tile.
        (torch.bfloat16, 32, 1, {64: [64]}),
    ],
)
def test_no_two_graphs_launch_the_same(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    classes: dict[int, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And each batch, with shared prefixes or without, has one that takes it."""
    monkeypatch.setattr(cost_model, "MIN_SAVED_BYTES", 0)
    pool = KVPool([LayerShape(kv_heads, 4, 4)], 1, 16, dtype)
    backend = TritonBackend(pool, dtype, heads, 64, 128, multiprocessors=8)
    launched: list[tuple[int, bool, int]] = []

    def forward(padded: PaddedDecode) -> torch.Tensor:
        items = padded.items(HeadShape(kv_heads, heads // kv_heads))
        (tile_rows,) = items.by_tile
        launched.append((padded.num_rows, items.num_partials > 0, tile_rows))
        return torch.zeros(padded.num_rows, VOCABULARY)

    graphs = DecodeGraphs(backend, forward, 64, groups=[heads // kv_heads], capture=Capture())
    graphs.capture()
    shared = backend.prepare(query_batch(shared_chunks(64, [(1, 3), (8, 1), (16, 1), (32, 1)])))
    assert not shared.plan.is_flat
    assert graphs.run(torch.zeros(64, dtype=torch.int64), shared) is not None
    launched.pop()
    assert len(launched) == len(set(launched))
    for num_rows, expected in classes.items():
        size = padded_size(num_rows)
        assert [tile for rows, merges, tile in launched if (rows, merges) == (size, True)] == expected


def test_rows_of_drafts_run_in_graphs_and_come_in_the_order_of_the_sequences() -> None:
    backend, capture = make_backend(4, max_draft_rows=16), Capture()
    graphs = DecodeGraphs(backend, Model(), 4, 16, groups=[1], capture=capture)
    graphs.capture()
    assert max(kind.size for kind in graphs.kinds) == 20
    for counts in ([3, 1, 5, 2], [5, 5, 5, 5], [1, 1, 1], [2]):
        chunks = [Chunk(Table([100 - i]), 3, count) for i, count in enumerate(counts)]
        batch = backend.prepare(query_batch(chunks))
        tokens = [torch.arange(count) + 10 * i for i, count in enumerate(counts)]
        capture.num_replayed = 0
        logits = graphs.run(torch.cat([tokens[i] for i in batch.order]), batch)
        assert logits is not None
        assert capture.num_replayed == 1
        assert logits.argmax(-1).tolist() == (torch.cat(tokens) + 10).tolist()
    many = backend.prepare(query_batch([Chunk(Table([0, 1]), 3, 21)]))
    assert graphs.run(torch.zeros(21, dtype=torch.int64), many) is None


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (16, 16), (9, 3)])
def test_partial_results_of_all_graphs_lie_where_the_largest_has_its_own(heads: int, kv_heads: int) -> None:
    """A graph's memory is measured on a few: if each took new memory for them, it would count once per graph."""
    pool = KVPool([LayerShape(kv_heads, 4, 4)], 1, 16, torch.bfloat16)
    backend = TritonBackend(pool, torch.bfloat16, heads, 256, 64, multiprocessors=132, max_draft_rows=1024)
    addresses = []

    def forward(padded: PaddedDecode) -> torch.Tensor:
        items = padded.items(HeadShape(kv_heads, heads // kv_heads))
        partials = graphs._partials.of(items.num_partials, torch.empty(padded.num_rows, heads, 4))
        assert [len(part) for part in partials] == [items.num_partials] * 2
        if items.num_partials:
            addresses.append(tuple(part.data_ptr() for part in partials))
        return torch.zeros(padded.num_rows, VOCABULARY)

    graphs = DecodeGraphs(backend, forward, 256, 1024, groups=[heads // kv_heads], capture=Capture())
    graphs.capture()
    assert len(addresses) > 20
    assert len(set(addresses)) == 1


@pytest.mark.parametrize("long", [False, True])
def test_drafts_below_a_shared_prefix_run_in_graphs(long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tiles are those of decoding batches, not those of prompts, however long one of them is."""
    monkeypatch.setattr(cost_model, "MIN_SAVED_BYTES", 0)
    pool = KVPool([LayerShape(8, 4, 4)], 1, 16, torch.bfloat16)
    backend = TritonBackend(pool, torch.bfloat16, 32, 16, 8000, multiprocessors=132, max_draft_rows=64)

    def forward(padded: PaddedDecode) -> torch.Tensor:
        padded.items(HeadShape(8, 4))
        return torch.zeros(padded.num_rows, VOCABULARY)

    graphs = DecodeGraphs(backend, forward, 16, 64, groups=[4], capture=Capture())
    graphs.capture()
    chunks = shared_chunks(16, [(1, 400)])
    counts = [65, *[1] * 15] if long else [5] * 16
    for chunk in chunks:
        chunk.table.block_ids = np.append(chunk.table.block_ids, range(7000, 7005)).astype(np.int32)
    drafted = query_batch([replace(chunk, num_new=count) for chunk, count in zip(chunks, counts, strict=True)])
    batch = backend.prepare(replace(drafted, num_decoding=drafted.num_new))
    assert batch.plan.ranges.num_shared == 1
    assert graphs.run(torch.zeros(80, dtype=torch.int64), batch) is not None


def test_without_a_gpu_work_runs_when_it_is_captured() -> None:
    """A batch was loaded before there was room for its items; these rows need wider tiles than those of one sequence."""
    pool = KVPool([LayerShape(2, 4, 4)], 1, 16, torch.bfloat16)
    backend = TritonBackend(pool, torch.bfloat16, 8, 16, 128, multiprocessors=1, max_draft_rows=16)
    computed: list[int] = []

    def forward(padded: PaddedDecode) -> torch.Tensor:
        padded.items(HeadShape(2, 4))
        computed.append(padded.num_rows)
        return torch.zeros(padded.num_rows, VOCABULARY)

    graphs = DecodeGraphs(backend, forward, 16, 16, groups=[4])
    graphs.capture()
    assert computed == [kind.size for kind in graphs.kinds]
    drafted = query_batch([Chunk(Table(range(4)), 20, 9)])
    batch = backend.prepare(replace(drafted, num_decoding=drafted.num_new))
    assert graphs.run(torch.zeros(9, dtype=torch.int64), batch) is not None


def test_capturing_takes_bounded_time_and_larger_graphs_stand_in(caplog: pytest.LogCaptureFixture) -> None:
    seconds = iter([0.0, *([MAX_CAPTURE_SECONDS / 4] * 3), *([2 * MAX_CAPTURE_SECONDS] * 99)])
    backend, capture = make_backend(16), Capture()
    graphs = DecodeGraphs(backend, Model(), 16, groups=[1], capture=capture, clock=lambda: next(seconds))
    with caplog.at_level(logging.WARNING):
        graphs.capture()
    assert capture.num_captured == 4
    assert "4 of 11 CUDA graphs were captured in 120 s" in caplog.text
    for count in (3, 16):
        assert decode(graphs, backend, list(range(count))) == list(range(10, 10 + count))
    assert capture.num_captured == 4
    assert capture.num_replayed == 2


@pytest.mark.parametrize("fails_at", [0, 5])
def test_without_memory_for_graphs_decoding_is_eager_and_one_warning_says_so(
    fails_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    backend, model = make_backend(16), Model()
    graphs = DecodeGraphs(backend, model, 16, groups=[1], capture=Capture(fails_at))
    with caplog.at_level(logging.WARNING):
        graphs.capture()
    assert [record.getMessage() for record in caplog.records] == [
        "decoding runs without CUDA graphs, which could not be captured: CUDA out of memory"
    ]
    assert graphs.num_captured == 0
    assert graphs._logits is None
    assert decode(graphs, backend, [1, 2]) is None


class Memory:
    """A GPU's memory, of which each graph takes some of its own, and the first also some that all use."""

    def __init__(self) -> None:
        self.free = 100_000
        self.shared = 0

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        work()
        taken = 700 + (0 if self.shared else 5_000)
        self.shared = 1
        self.free -= taken

        def give_back() -> None:
            self.free += taken

        def replay() -> object:
            return work()

        weakref.finalize(replay, give_back)
        return replay


def test_the_memory_of_all_graphs_is_measured_on_some() -> None:
    runner = ModelRunner(load_model(build_supported("llama"), native=False))
    memory = Memory()
    runner._graphs = DecodeGraphs(make_backend(40), Model(), 40, groups=[1], capture=memory.capture)
    num_kinds = len(runner._graphs.kinds)
    assert num_kinds > 10
    assert runner.measure_graphs(lambda: (gc.collect(), memory.free)[1]) == 5_000 + 700 * num_kinds
    assert memory.free == 100_000


def test_graphs_that_cannot_be_captured_are_tried_once(caplog: pytest.LogCaptureFixture) -> None:
    runner = ModelRunner(load_model(build_supported("llama"), native=False))
    runner._graphs = DecodeGraphs(make_backend(40), Model(), 40, groups=[1], capture=Capture(fails_at=0))
    with caplog.at_level(logging.WARNING):
        assert runner.measure_graphs(lambda: 0) == 0
        runner.capture_graphs()
    assert len(caplog.records) == 1
    assert not runner._can_capture
