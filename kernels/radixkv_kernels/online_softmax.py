"""Shared by the attention kernels: a tile of query rows over a range of keys, with a running softmax.

Online softmax (Milakov and Gimelshein 2018) as in FlashAttention (Dao et al. 2022), to base 2: scores are multiplied by
log2(e) once, so that every exponential is one `exp2`. Scores, sums and outputs are float32 whatever the inputs are.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from radixkv_kernels.target import Target, current_target

LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))


@triton.jit
def load_query(query, row, head, wanted, row_stride, head_stride,
               DIM: tl.constexpr, TILE: tl.constexpr, COMPUTE: tl.constexpr):  # fmt: skip
    """``[rows of the tile, TILE]``; rows that are not wanted are 0."""
    dim = tl.arange(0, TILE)
    offset = row.to(tl.int64) * row_stride + head.to(tl.int64) * head_stride
    mask = wanted[:, None] & (dim < DIM)[None, :]
    tile = tl.load(query + offset[:, None] + dim[None, :], mask=mask, other=0.0)
    if COMPUTE == tl.float16 and query.dtype.element_ty != tl.float16:  # noqa: SIM300
        # bfloat16 numbers may lie beyond float16's range, and infinities would become NaN.
        tile = tl.minimum(tl.maximum(tile.to(tl.float32), -65504.0), 65504.0)
    return tile.to(COMPUTE)


@triton.jit
def attend_keys(
    query, output, odd_output, row_max, row_sum, row_position,
    key_cache, value_cache, table, block,
    start, stop, end, window, scale, cap,
    key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
    MASKED: tl.constexpr, PAIRS: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Fold the keys ``start .. stop``, in tiles of ``KEYS``, into a tile's running output, maximum and sum.

    Without ``MASKED`` every row sees every key of these whole tiles. With it a row sees keys up to its own position, in
    its window, below ``end``; it may see none at all.

    ``key_cache`` and ``value_cache`` point at the head, ``table`` at the sequence's first block id, and ``block`` are the
    ids for the first tile's keys. Those for the next tile are loaded one tile ahead and passed on: the compiler only moves
    loads of keys and values ahead of the arithmetic where no other load comes before them in the same iteration.

    With ``PAIRS``, values are words of two float8 numbers, and `VALUE_DIM` and the like count words: ``output`` is of the
    even numbers, ``odd_output`` of the odd ones. Without, ``odd_output`` is returned as it is.
    """
    for first in tl.range(start, stop, KEYS):
        position = first + tl.arange(0, KEYS)
        exists = position < end
        slot = position % BLOCK_SIZE
        key = load_tile(key_cache, block, slot, key_block_stride, key_slot_stride, exists, MASKED, KEY_DIM, KEY_TILE)
        value = load_tile(
            value_cache, block, slot, value_block_stride, value_slot_stride, exists, MASKED, VALUE_DIM, VALUE_TILE
        )
        block = load_blocks(table, first + KEYS, end, KEYS, BLOCK_SIZE)

        # Scaled only inside the exponent, where it costs nothing: a multiplication and an addition are one instruction.
        score = tl.dot(query, tl.trans(key).to(COMPUTE), input_precision="ieee")
        if SOFTCAP:
            score = 1.0 - 2.0 / (tl.exp2(score * scale) + 1.0)
            factor = cap
        else:
            factor = scale
        if MASKED:
            visible = (position[None, :] <= row_position[:, None]) & exists[None, :]
            if WINDOW:
                visible = visible & (position[None, :] > row_position[:, None] - window)
            score = tl.where(visible, score, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(score, 1) * factor)
            # A row that has seen nothing yet: anything finite will do in place of minus infinity.
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        else:
            new_max = tl.maximum(row_max, tl.max(score, 1) * factor)
            base = new_max
        shrink = tl.exp2(row_max - base)
        weight = tl.exp2(score * factor - base[:, None])
        row_sum = row_sum * shrink + tl.sum(weight, 1)
        weight = weight.to(COMPUTE)
        if PAIRS:
            even, odd = split_pairs(value, COMPUTE)
            output = tl.dot(weight, even, output * shrink[:, None], input_precision="ieee")
            odd_output = tl.dot(weight, odd, odd_output * shrink[:, None], input_precision="ieee")
        else:
            output = tl.dot(weight, value.to(COMPUTE), output * shrink[:, None], input_precision="ieee")
        row_max = new_max
    return output, odd_output, row_max, row_sum, block


@triton.jit
def split_pairs(words, COMPUTE: tl.constexpr):  # fmt: skip
    """The lower and the upper of the two float8 numbers in each int16."""
    even = (words & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    odd = ((words >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return even.to(COMPUTE), odd.to(COMPUTE)


@triton.jit
def load_tile(cache, block, slot, block_stride, slot_stride, exists,
              MASKED: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """``[keys, TILE]``, read where the keys lie; with ``MASKED``, keys that do not exist are 0."""
    dim = tl.arange(0, TILE)[None, :]
    pointers = cache + (block.to(tl.int64) * block_stride + slot * slot_stride)[:, None] + dim
    if MASKED:
        return tl.load(pointers, mask=exists[:, None] & (dim < DIM), other=0.0)
    elif DIM < TILE:
        return tl.load(pointers, mask=dim < DIM, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_blocks(table, start, end, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Block ids of the ``KEYS`` keys from ``start`` on; 0 for those from ``end`` on."""
    position = start + tl.arange(0, KEYS)
    return tl.load(table + position // BLOCK_SIZE, mask=position < end, other=0)


@triton.jit
def attend_range(
    query, row_position, first_position, last_position,
    key_cache, value_cache, table,
    start, end, window, scale, cap,
    key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A tile over the keys ``start .. end``; masks are paid for only where some row does not see some key.

    ::

        keys    start        all windows reached       first row's own position      end
                  |--- masked ---|------- every row sees all -------|----- masked -----|

    With ``PAIRS``, see `reads_pairs`, values are read as words of two numbers; strides in words are half of those in numbers.

    Returns:
        Output ``[ROWS, VALUE_TILE]``, still to be divided by the third; log2 of the largest weight; sum of weights.
    """
    WORD: tl.constexpr = 2 if PAIRS else 1
    DIM: tl.constexpr = VALUE_DIM // WORD
    TILE: tl.constexpr = VALUE_TILE // WORD
    output = tl.zeros([ROWS, TILE], tl.float32)
    odd_output = 0.0
    if PAIRS:
        odd_output = output
        value_cache = value_cache.to(tl.pointer_type(tl.int16), bitcast=True)
        value_block_stride //= 2
        value_slot_stride //= 2
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    block = load_blocks(table, start, end, KEYS, BLOCK_SIZE)
    clear = start
    if WINDOW:
        clear = start + tl.cdiv(tl.maximum(last_position - window + 1 - start, 0), KEYS) * KEYS
        output, odd_output, row_max, row_sum, block = attend_keys(
            query, output, odd_output, row_max, row_sum, row_position,
            key_cache, value_cache, table, block, start, tl.minimum(clear, end), end, window, scale, cap,
            key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
            True, PAIRS, KEYS, BLOCK_SIZE, KEY_DIM, DIM, KEY_TILE, TILE, WINDOW, SOFTCAP, COMPUTE,
        )  # fmt: skip
    causal = start + tl.maximum(tl.minimum(end, first_position + 1) - start, 0) // KEYS * KEYS
    output, odd_output, row_max, row_sum, block = attend_keys(
        query, output, odd_output, row_max, row_sum, row_position,
        key_cache, value_cache, table, block, clear, causal, end, window, scale, cap,
        key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
        False, PAIRS, KEYS, BLOCK_SIZE, KEY_DIM, DIM, KEY_TILE, TILE, WINDOW, SOFTCAP, COMPUTE,
    )  # fmt: skip
    output, odd_output, row_max, row_sum, _ = attend_keys(
        query, output, odd_output, row_max, row_sum, row_position,
        key_cache, value_cache, table, block, tl.maximum(clear, causal), end, end, window, scale, cap,
        key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
        True, PAIRS, KEYS, BLOCK_SIZE, KEY_DIM, DIM, KEY_TILE, TILE, WINDOW, SOFTCAP, COMPUTE,
    )  # fmt: skip
    if PAIRS:
        output = tl.reshape(tl.join(output, odd_output), [ROWS, VALUE_TILE])
    return output, row_max, row_sum


@triton.jit
def add_sink(row_max, row_sum, sink):
    """The sum with one more logit that has no value (attention sinks, Xiao et al. 2023, as gpt-oss learns them)."""
    base = tl.where(row_max == float("-inf"), 0.0, row_max)
    return row_sum + tl.exp2(sink.to(tl.float32) * LOG2_E - base)


@triton.jit
def divide(output, row_sum):
    """``output / row_sum``, and 0 for the rows that have seen no key."""
    return output / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]


@triton.jit
def log_sum_exp(row_max, row_sum):
    """To base 2; minus infinity for the rows that have seen no key."""
    return tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(tl.where(row_sum == 0.0, 1.0, row_sum)))


def reads_pairs(tile_rows: int, value_cache: torch.Tensor, value_tile: int) -> bool:
    """Whether a program reads float8 values as 16-bit words of two.

    A warp's own tensor core takes values of neighbouring tokens side by side. The instruction that transposes a tile while
    reading it from shared memory moves 16 bits at a time; single bytes each take a load of their own, and these would take
    longer than reading the memory does: for 16 rows and 64 keys a warp makes 64 loads in place of 4 such instructions, in
    205 registers in place of 122, so that a multiprocessor of sm_90 runs 2 programs in place of 4. Warp groups read a
    converted copy.
    """
    if value_cache.itemsize != 1 or value_tile < 32 or (tile_rows >= 64 and current_target().has_warp_groups):
        return False
    return all(n % 2 == 0 for n in (*value_cache.stride()[:3], value_cache.shape[3], value_cache.data_ptr()))


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """The kernel's ``scale`` and ``cap`` for a model's: ``scale`` goes into the exponent, or with a cap into its tanh.

    A capped score is ``softcap * tanh(x)`` with ``x = dot * scale / softcap``. As ``tanh(x) = 1 - 2 / (exp(2 x) + 1)``, one
    `exp2` does it where ``scale`` holds ``2 * scale * log2(e) / softcap`` and ``cap`` holds ``softcap * log2(e)``.

    Raises:
        ValueError: one is not positive: kernels find the largest score before scaling it.
    """
    for name, factor in (("scale", scale), ("softcap", softcap)):
        if factor is not None and not factor > 0:
            raise ValueError(f"{name}: expected a number above 0, got {factor}")
    log2_e = math.log2(math.e)
    return (scale * log2_e, 0.0) if softcap is None else (2 * scale * log2_e / softcap, softcap * log2_e)


def kernel_window(window: int | None) -> int:
    """The kernel's ``window``; capped beyond any sequence's length, so that a position minus the window is an int32."""
    return min(window or 0, 2**30)


class TileConfig(NamedTuple):
    """How a program is cut: keys per tile, a power of 2 from 16 on; warps; and stages of its pipeline."""

    keys: int
    warps: int
    stages: int


# Most bytes of a program's tiles of keys and values: so two programs of 64 rows fit a multiprocessor of sm_90, 112 KiB each
# of 227 with their queries, and three of 16 rows, 70 KiB each.
_TILES_NBYTES = 96 * 1024


def tile_config(
    tile_rows: int,
    key_tile: int,
    value_tile: int,
    query_dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> TileConfig:
    """Keys per tile, warps and pipeline stages: as many keys as registers hold, as many stages as shared memory does.

    ============================  ====  =====  ===================================================================
    case                          keys  warps  why
    ============================  ====  =====  ===================================================================
    the halves, 16 or 64 rows     64    4      128 rows take 8 warps: each computes 16 rows, a tensor core's tile
    128 rows, heads of 128        128   8      on sm_90, in 16 bits: prompts take 12 % less time than with 64 on an H100
    64 rows, no warp groups       32           operands live in registers, and 64 keys spill: 52 times on sm_120
    heads of 256                  32           in float8 more spill: 92 times in a loop with 128 rows on sm_90
    64 rows, heads of 256               8      so that the output does not spill; 128 rows do, without warp groups
    queries in float32            16    8      multiplied without tensor cores, operands in registers; 16 rows: 4 warps
    64 rows, heads of 192, 128    32           for warp groups: in 16 bits 64 keys leave room for two stages, and a fourth
                                               spills on sm_100 and takes a second program's room; float8 takes 8 warps, for
                                               64 keys spill on sm_90, and 32 with 4 warps on sm_100
    ============================  ====  =====  ===================================================================

    With n stages, n - 1 tiles of keys and values are on their way while one is computed. What is on its way, over all
    programs of a multiprocessor, hides the memory's latency: with bfloat16 and heads of 128, 2 tiles of 32 KiB for each of 3
    programs of 16 rows. With two stages none is: compiled code waits for all copies before it multiplies. So where tiles do
    not fit beside the queries, as heads of 256 on sm_86, sm_89 and sm_120 with their 99 KiB, stages beyond the third are
    given up first, then keys, then the other stages.

    Raises:
        ValueError: not even the smallest tiles fit.
    """
    return _tile_config(tile_rows, key_tile, value_tile, query_dtype, cache_dtype, current_target())


@functools.cache  # called for each launch
def _tile_config(
    tile_rows: int,
    key_tile: int,
    value_tile: int,
    query_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    target: Target,
) -> TileConfig:
    warp_groups = target.has_warp_groups and tile_rows >= 64 and query_dtype != torch.float32
    wider_keys = warp_groups and tile_rows == 64 and key_tile > value_tile
    halves = cache_dtype.itemsize == 2
    if target.architecture == 90 and tile_rows == 128 and halves and key_tile == value_tile == 128:
        # The only program on its multiprocessor: 32 KiB of queries, and three tiles of 64 KiB. Warp groups have weights in
        # registers.
        return TileConfig(128, 8, 3)
    most_keys, most_stages = 64, 3 if wider_keys and halves else 4
    if query_dtype == torch.float32:
        most_keys = 16
    elif wider_keys or value_tile > 128 or (tile_rows >= 64 and not warp_groups):
        most_keys = 32
    many_registers = query_dtype == torch.float32 or value_tile > 128 or (wider_keys and not halves)
    wide = tile_rows == 128 or (tile_rows == 64 and many_registers)
    token = (key_tile + value_tile) * cache_dtype.itemsize
    # Fewer than three stages leave no tile on its way: a tile that has been read makes room for the next one.
    for fewest_stages in (3, 2, 1):
        keys = most_keys
        while keys >= 16:
            for stages in range(min(most_stages, max(1, _TILES_NBYTES // (keys * token))), fewest_stages - 1, -1):
                # Warp groups read a tile where it lies, so that it cannot be replaced yet; the others have it in registers,
                # but pass their weights through shared memory.
                tiles = (stages if warp_groups else stages - 1) * keys * token
                rows = tile_rows * (key_tile + keys) * query_dtype.itemsize
                if tiles + rows <= target.shared_memory:
                    return TileConfig(keys, 8 if wide else 4, stages)
            keys //= 2
    name = str(query_dtype).removeprefix("torch.")
    raise ValueError(
        f"tile_rows: {tile_rows} rows of {key_tile} elements in {name} do not fit beside a tile of keys and values into the "
        f"{target.shared_memory} bytes of shared memory of sm_{target.architecture}"
    )
