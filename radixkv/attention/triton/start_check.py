"""Runs every kernel once, in every configuration that a model's layers will launch, before the first request does.

A kernel that a GPU refuses, for lack of shared memory or registers, or that is compiled wrongly, would otherwise fail in the
middle of a request, in the first batch that takes its tiles. Here the error names the kernel and its configuration, and the
next start finds compiled kernels on disk. Results are compared with the plain reference, on problems of a few tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from radixkv.attention.options import AttentionLayer
from radixkv.attention.triton.cost_model import Tiling, max_tiles, widest_tile
from radixkv_kernels import (
    NO_PARTIAL,
    OPEN_END,
    TILE_ROWS,
    BlockCopier,
    advance_rows,
    attend_items,
    attend_split,
    draw_tokens,
    draw_truncated,
    merge_partials,
    merge_splits,
    reference,
    rotate_and_write,
    write_cache,
)
from radixkv_kernels.target import current_target

_FP8 = torch.float8_e4m3fn
_TABLES = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32)
# The first row's position; the second of two pieces of keys begins before it.
_PREFIX = 20
_BOUNDS = MappingProxyType({torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2, _FP8: 0.1})

# A kernel's results, and the reference's.
Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]
Work = Callable[[], Pairs]


def check_kernels(
    layers: Iterable[AttentionLayer],
    block_size: int,
    query_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device | str,
    vocab_size: int,
) -> int:
    """Run all kernels for all layers, like layers once, and compare the results with the reference.

    Args:
        query_dtype: of queries, and of new keys and values.
        cache_dtype: of stored ones.
        device: the current CUDA device, or the CPU for the interpreter.
        vocab_size: of the logits from which tokens are drawn.

    Returns:
        How many configurations ran.

    Raises:
        RuntimeError: one does not run, or its result is wrong; the message names it.
    """
    count = 0
    for layer in {_distinct(layer): layer for layer in layers}.values():
        problem = _Problem(layer, block_size, query_dtype, cache_dtype, device, vocab_size)
        for name, work in problem.launches():
            _run(f"{name}, {problem}", work, problem.bound)
            count += 1
    return count


def _distinct(layer: AttentionLayer) -> tuple[object, ...]:
    """A key: layers with equal keys launch the same compiled kernels."""
    options = layer.options
    return (
        layer.shape, layer.num_query_heads, layer.rotary_dim,
        options.softcap is None, options.sliding_window is None, None if options.sinks is None else options.sinks.dtype,
    )  # fmt: skip


def _call(launch: Callable[..., object], *args: object, **options: Any) -> None:
    """Call ``launch`` unchecked: a type checker cannot match tensors unpacked from lists to its parameters."""
    launch(*args, **options)


def _run(name: str, work: Work, bound: float) -> None:
    try:
        # A kernel's error often surfaces only in a later call; here that is the comparison, which waits for the kernel.
        for result, truth in work():
            is_exact = not result.is_floating_point()
            result, truth = result.double().cpu(), truth.double().cpu()
            if is_exact and not torch.equal(result, truth):
                raise ArithmeticError(f"its result is {result.tolist()}, by the reference {truth.tolist()}")
            error = float((result - truth).norm() / truth.norm().clamp_min(1e-30))
            if not error <= bound:
                raise ArithmeticError(f"its result differs from the reference by {error:.2g} of its norm")
    except Exception as error:  # the compiler's, the driver's, and torch's: nothing is hidden, all of it is named
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "this machine"
        raise RuntimeError(f"{name}: the kernel cannot be used on {gpu}: {error}") from error


class _Problem:
    """The input of all kernels: a few rows of one sequence over a few blocks, on the host."""

    def __init__(
        self,
        layer: AttentionLayer,
        block_size: int,
        query_dtype: torch.dtype,
        cache_dtype: torch.dtype,
        device: torch.device | str,
        vocab_size: int,
    ) -> None:
        shape, options = layer.shape, layer.options
        self._layer = layer
        self._block_size = block_size
        self._dtype = query_dtype
        self._cache_dtype = cache_dtype
        self._device = device
        self._vocab_size = vocab_size
        self._generator = torch.Generator().manual_seed(0)
        self._caches = [
            self._random(_TABLES.numel(), block_size, shape.num_kv_heads, dim).to(cache_dtype)
            for dim in (shape.key_dim, shape.value_dim)
        ]
        scales = torch.full((shape.num_kv_heads,), 0.5) if cache_dtype == _FP8 else None
        self._scales: dict[str, Any] = {"key_scales": scales, "value_scales": scales}
        self._options = {
            "scale": options.scale,
            "softcap": options.softcap,
            "window": options.sliding_window,
            "sinks": None if options.sinks is None else options.sinks.cpu(),
            **self._scales,
        }

    @property
    def bound(self) -> float:
        """The largest norm that an error may have, relative to the reference's."""
        return max(_BOUNDS[self._dtype], _BOUNDS[self._cache_dtype])

    def __str__(self) -> str:
        shape, options = self._layer.shape, self._layer.options
        query, stored = (str(dtype).removeprefix("torch.") for dtype in (self._dtype, self._cache_dtype))
        optional = {"softcap": options.softcap, "sliding window": options.sliding_window, "sinks": options.sinks}
        given = "".join(f", {name}" for name, value in optional.items() if value is not None)
        return (
            f"{self._layer.num_query_heads} query and {shape.num_kv_heads} key-value heads of {shape.key_dim} and "
            f"{shape.value_dim}, queries in {query}, stored in {stored}{given}"
        )

    def launches(self) -> Iterator[tuple[str, Work]]:
        """Every kernel with its name."""
        group = self._layer.num_query_heads // self._layer.shape.num_kv_heads
        if self._layer.rotary_dim is None:
            yield "write_cache", self._write
        else:
            yield "rotate_and_write", partial(self._rotate, self._layer.rotary_dim)
        yield "copy_blocks", self._copy
        yield "advance_rows", self._advance
        tiling = Tiling(1, widest_tile=widest_tile([self._layer.shape], current_target()))
        tiles = max_tiles(TILE_ROWS[-1], group, self._dtype, tiling)
        for tile_rows in tiles:
            yield f"attend_items with tiles of {tile_rows} rows", partial(self._items, tile_rows)
        yield "attend_split", self._split
        yield "draw_tokens", self._draw
        yield "draw_truncated", partial(self._draw, truncated=True)

    def _random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._generator).to(self._dtype)

    def _to_device(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Copies on the device: the reference computes on the host."""
        return [tensor.to(self._device, copy=True) for tensor in tensors]

    def _compare(
        self,
        kernel: Callable[..., object],
        truth: Callable[..., object],
        arguments: Sequence[torch.Tensor],
        results: Sequence[int],
        options: dict[str, Any],
    ) -> Pairs:
        """Call both with copies of the same arguments; returns those that hold results, by their indices."""
        ours, theirs = self._to_device(*arguments), [argument.clone() for argument in arguments]
        kernel(*ours, **self._on_device(options))
        truth(*theirs, **options)
        return [(ours[index], theirs[index]) for index in results]

    def _new_keys(self, count: int) -> list[torch.Tensor]:
        """Keys and values of new tokens."""
        shape = self._layer.shape
        return [self._random(count, shape.num_kv_heads, dim) for dim in (shape.key_dim, shape.value_dim)]

    def _write(self) -> Pairs:
        count = self._block_size + 3
        arguments = [*self._new_keys(count), *self._caches, torch.arange(count)]
        return self._compare(write_cache, reference.write_cache, arguments, (2, 3), self._scales)

    def _rotate(self, rotary_dim: int) -> Pairs:
        count = self._block_size + 3
        query = self._random(count, self._layer.num_query_heads, self._layer.shape.key_dim)
        angles = torch.rand(count, rotary_dim // 2, generator=self._generator, dtype=torch.float32).repeat(1, 2)
        rotation = angles.cos().to(self._dtype), angles.sin().to(self._dtype)
        arguments = [
            query,
            *self._new_keys(count),
            *rotation,
            *self._caches,
            torch.arange(count),
            torch.zeros_like(query),
        ]
        return self._compare(rotate_and_write, reference.rotate_and_write, arguments, (5, 6, 8), self._scales)

    def _copy(self) -> Pairs:
        ours, truth = self._to_device(*self._caches), [cache.clone() for cache in self._caches]
        copies = [(0, 1, self._block_size), (2, 3, 5)]
        BlockCopier(ours).copy(copies)
        reference.copy_blocks(truth, copies)
        return zip(ours, truth, strict=True)

    def _advance(self) -> Pairs:
        before = torch.tensor([3, -1, self._block_size - 1], dtype=torch.int32)
        positions, slots, row_tables = self._to_device(
            before, torch.zeros(3, dtype=torch.int64), torch.zeros_like(before)
        )
        _call(advance_rows, positions, slots, *self._to_device(_TABLES), row_tables, block_size=self._block_size)
        first, second = _TABLES[0, :2].tolist()
        return [
            (positions, torch.tensor([4, -1, self._block_size])),
            (slots, torch.tensor([first * self._block_size + 4, 0, second * self._block_size])),
        ]

    def _rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, outputs that hold nothing yet, and positions."""
        query = self._random(count, self._layer.num_query_heads, self._layer.shape.key_dim)
        output = query.new_full((*query.shape[:2], self._layer.shape.value_dim), float("nan"))
        positions = torch.arange(_PREFIX, _PREFIX + count, dtype=torch.int32) % (_TABLES.numel() * self._block_size)
        return query, output, positions

    def _partials(self, count: int) -> list[torch.Tensor]:
        heads = self._layer.num_query_heads
        return [
            torch.full(size, float("nan"), dtype=torch.float32)
            for size in ((count, heads, self._layer.shape.value_dim), (count, heads))
        ]

    def _items(self, tile_rows: int) -> Pairs:
        """A tile of neighbouring rows over all their keys at once, and one over two pieces that are merged."""
        group = self._layer.num_query_heads // self._layer.shape.num_kv_heads
        count = min(tile_rows // group, _TABLES.numel() * self._block_size - _PREFIX)
        query, output, positions = self._rows(2 * count)
        whole = [0, count, 0, 0, OPEN_END, NO_PARTIAL]
        pieces = [[count, count, 0, 0, 16, 0], [count, count, 0, 16, OPEN_END, count]]
        items = torch.tensor([whole, *pieces], dtype=torch.int32)
        starts = torch.tensor([0] * count + [2 * i for i in range(count + 1)], dtype=torch.int32)
        partials = torch.tensor([(i, count + i) for i in range(count)], dtype=torch.int32).view(-1)
        arguments, merged = (query, *self._caches, _TABLES, positions, items), (starts, partials, positions)

        truth, *true_partials = output.clone(), *self._partials(2 * count)
        _call(reference.attend_items, *arguments, truth, *true_partials, **self._options)
        _call(reference.merge_partials, *true_partials, *merged, truth, sinks=self._options["sinks"])
        ours, *our_partials = self._to_device(output, *self._partials(2 * count))
        options = self._on_device(self._options)
        _call(attend_items, *self._to_device(*arguments), ours, *our_partials, tile_rows=tile_rows, **options)
        _call(merge_partials, *our_partials, *self._to_device(*merged), ours, sinks=options["sinks"])
        return [(ours, truth)]

    def _split(self) -> Pairs:
        query, output, positions = self._rows(2)
        row_tables = torch.zeros_like(positions)
        items = torch.tensor([[i, 1, 0, 0, OPEN_END, NO_PARTIAL] for i in range(2)], dtype=torch.int32)
        truth, unused = output.clone(), self._partials(0)
        arguments = query, *self._caches, _TABLES
        _call(reference.attend_items, *arguments, positions, items, truth, *unused, **self._options)
        ours, *partials = self._to_device(output, *self._partials(4))
        options, rows = self._on_device(self._options), (row_tables, positions)
        _call(attend_split, *self._to_device(*arguments, *rows), ours, *partials, num_splits=2, **options)
        _call(merge_splits, *partials, ours, num_splits=2, sinks=options["sinks"])
        return [(ours, truth)]

    def _draw(self, truncated: bool = False) -> Pairs:
        """Draw from rows of logits of which each allows only one id."""
        drawn = torch.tensor([self._vocab_size - 1, 0, self._vocab_size * 3 // 5])
        logits = torch.full((3, self._vocab_size), float("-inf"), dtype=torch.float32)
        logits[torch.arange(3), drawn] = 2.0
        ones = torch.ones(3, dtype=torch.float32)
        given = self._to_device(logits, ones, torch.arange(3))
        if not truncated:
            return [(draw_tokens(*given), drawn)]
        min_p, top_k, top_p = self._to_device(0.1 * ones, torch.full((3,), 2, dtype=torch.int32), 0.9 * ones)
        return [(draw_truncated(*given, min_p=min_p, top_k=top_k, top_p=top_p), drawn)]

    def _on_device(self, options: dict[str, Any]) -> dict[str, Any]:
        return {
            name: value.to(self._device) if isinstance(value, torch.Tensor) else value
            for name, value in options.items()
        }
