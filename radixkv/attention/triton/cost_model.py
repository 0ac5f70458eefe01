"""When sharing and splitting pay on a GPU.

Reading keys and values dominates the cost of decoding, so every rule weighs bytes. Measurements are of an H100 unless another
GPU is named, with bfloat16, 32 query and 8 key-value heads of 128.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.attention.sharing_rule import SharingRule
from radixkv.memory import LayerShape
from radixkv_kernels import TILE_ROWS
from radixkv_kernels.target import Target, current_target

# Programs of a tile class that run on one multiprocessor at once. From the compilers' reports for sm_90, bfloat16 and heads
# of 128: Triton 3.6 takes 150 registers x 128 threads, 206 x 128 and 255 x 256 of 65,536, and of shared memory 70, 112 and
# 225 KiB of 227.
PROGRAMS_PER_MULTIPROCESSOR = MappingProxyType({16: 3, 64: 2, 128: 1})

_TILE_ROWS = np.array(TILE_ROWS)

# Most rows of a tile in a decoding batch, unless a group has more heads: two programs of 128 do not fit a multiprocessor.
_WIDEST_IN_DECODING = 64

# A piece writes partial results of about a kilobyte per head and waits for its keys' latency before the first is done. One
# sequence of 4,096 tokens took 22.5 us in pieces of 512, 19.2 of 256 and 21.4 of 128.
MIN_PIECE_KEYS = 256

# An item's fixed cost, in keys: one memory latency, in which a program that shares a multiprocessor with two others would
# read some 20 keys of 512 bytes, and its partial results, which cost as much as 8 keys for a group of 4.
_START_KEYS = 32

# A range is cut into pieces for at most so many waves of programs.
_MAX_WAVES = 4

# How many shared prefixes may continue one another. The deeper a prefix, the fewer rows share it; each level adds a partial
# result per row, for which there must be room.
MAX_LEVELS = 4

# Sharing takes a merge that a flat batch does not need, writes each row's tail as a partial result, and reads tails in wider
# tiles. 16 sequences that saved 60 MiB gained 2 us of 30. With tails in tiles of their own, 64 sequences lost 11 us of 53
# where they saved 63 MiB, and gained 16 of 83 where they saved 252.
MIN_SAVED_BYTES = 64 * 2**20


def sharing_rule(group: int, query_dtype: torch.dtype, cache_dtype: torch.dtype, bytes_per_token: int) -> SharingRule:
    """A shared prefix gets work items of its own where that saves more than it costs.

    A key and value are ``2 * kv heads * dim`` elements. Written and read back, a row's partial result is ``2 * kv heads *
    group * dim`` numbers of 4 bytes: as much as ``4 * group / element bytes`` keys. So the rows of a prompt, whose tiles
    are full, hardly ever gain by sharing what is before them, and decoding rows nearly always.

    A decoding batch shares prefixes only if all of them together save more than a merge and wider tiles cost.

    Args:
        group: query heads per key-value head, of most layers.
        query_dtype: decides the widest tile of a decoding batch.
        cache_dtype: of stored keys and values.
        bytes_per_token: of a token's keys and values in one layer.
    """
    widest = TILE_ROWS[int(tile_classes(np.array([TILE_ROWS[-1]]), group, query_dtype, Tiling(1, one_class=True))[0])]
    return SharingRule(
        cost_per_row=4 * group / cache_dtype.itemsize,
        rows_per_reading=widest // group,
        max_levels=MAX_LEVELS,
        min_saved_tokens=-(-MIN_SAVED_BYTES // bytes_per_token),
    )


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a batch is cut into tiles for the GPU.

    Attributes:
        multiprocessors: of the device.
        one_class: for decoding batches: all ranges are attended in one launch, in tiles of 16 rows, or of 64 where a shared
            range has more, though a tail then fills a sixteenth of its tile. With classes in turn instead, trees of 256
            sequences took .04 to .05 more time on an H100, and .05 to .08 less on an H200. False: one tile class after the
            other, of up to 128 rows, each range in the tiles that fit it.
        widest_tile: rows, see `widest_tile`.
    """

    multiprocessors: int
    one_class: bool = False
    widest_tile: int = TILE_ROWS[-1]

    def num_concurrent(self, tile_rows: int) -> int:
        """Programs of a tile class that run at once."""
        return self.multiprocessors * PROGRAMS_PER_MULTIPROCESSOR[tile_rows]


def widest_tile(layers: Sequence[LayerShape], target: Target) -> int:
    """Rows of the widest tile that is worth taking, unless a group has more heads.

    Without warp groups, each warp multiplies from its registers. There 128 rows with heads of 256 spill, 51 loads and stores
    on sm_89 with Triton 3.9 and 142 with 3.6, and leave no shared memory to prefetch a tile into; 64 rows take 216 registers,
    and spill none.
    """
    largest = max(max(layer.key_dim, layer.value_dim) for layer in layers)
    return 64 if largest > 128 and not target.has_warp_groups else TILE_ROWS[-1]


def decode_tiling(device: torch.device, layers: Sequence[LayerShape], multiprocessors: int | None = None) -> Tiling:
    """How decoding batches are cut into tiles on a device; on a CPU, in the interpreter, as for one multiprocessor.

    Args:
        device: if it is a GPU, the current one.
        layers: of the model.
        multiprocessors: among which work is divided; None: those of the device.
    """
    if device.type != "cuda":
        return Tiling(multiprocessors or 1, one_class=True)
    return Tiling(
        multiprocessors or torch.cuda.get_device_properties(device).multi_processor_count,
        one_class=True,
        widest_tile=widest_tile(layers, current_target()),
    )


def tile_classes(num_rows: NDArray[np.int64], group: int, dtype: torch.dtype, tiling: Tiling) -> NDArray[np.int64]:
    """Indices into `TILE_ROWS` for ranges of ``num_rows`` query rows, with ``group`` heads each.

    The narrowest that holds a range, or the widest allowed. float32 is multiplied without tensor cores, from registers; tiles
    wider than a group needs would only spill.
    """
    if dtype == torch.float32:
        most = np.full(len(num_rows), group)
    elif tiling.one_class:
        most = np.full(len(num_rows), min(int(num_rows.max(initial=1)) * group, max(group, _WIDEST_IN_DECODING)))
    else:
        most = np.minimum(num_rows * group, max(group, tiling.widest_tile))
    return _TILE_ROWS[:-1].searchsorted(most)


def num_pieces(
    num_keys: NDArray[np.int64],
    num_tiles: NDArray[np.int64],
    work: NDArray[np.int64],
    num_kv_heads: int,
    tile_class: NDArray[np.int64],
    tiling: Tiling,
) -> NDArray[np.int64]:
    """Into how many pieces each range of keys is split, so that the last program of a tile class ends as early as possible.

    Args:
        num_keys: of each range.
        num_tiles: row tiles over each range; each tile and head is a program per piece.
        work: keys that the tiles over each range see in total; a prompt's first tiles see fewer.
        tile_class: of each range, see `tile_classes`.
    """
    num_programs, head_work = num_tiles * num_kv_heads, work * num_kv_heads
    pieces = np.empty_like(num_keys)
    for index in np.flatnonzero(np.bincount(tile_class)).tolist():
        own = tile_class == index
        num_concurrent = tiling.num_concurrent(TILE_ROWS[index])
        pieces[own] = _pieces_of_class(num_keys[own], num_programs[own], head_work[own], num_concurrent)
    return pieces


# Candidate lengths of pieces, by the number of waves that they may make, in units of an even share of the work for each
# concurrent program. The first leaves all ranges whole. Some are a little longer than even, for pieces that would just not
# fit.
_ONE_WAVE = (np.inf, 2.0, 1.5, 1.25, 1.1, 1.0)
_MORE_WAVES = tuple(longer / waves for waves in range(2, _MAX_WAVES + 1) for longer in (1.1, 1.0))
_SHARES = MappingProxyType({1: np.array(_ONE_WAVE)[:, None], _MAX_WAVES: np.array(_ONE_WAVE + _MORE_WAVES)[:, None]})


def _pieces_of_class(
    num_keys: NDArray[np.int64], num_programs: NDArray[np.int64], work: NDArray[np.int64], num_concurrent: int
) -> NDArray[np.int64]:
    """Pieces of each range, of the length, among a few, with which the work is done first by a model of two numbers.

    Programs start in order as others end. So all of them take as long as the longest one, or as ``programs / num_concurrent``
    waves that are each as long as a program is on average, whichever is more.

    Args:
        num_programs: of each range, per piece.
        work: keys that these see in total.
        num_concurrent: programs that run at once.
    """
    total_work, total_programs = work.sum(), int(num_programs.sum())
    share = total_work / num_concurrent
    if total_programs >= _MAX_WAVES * num_concurrent and num_keys.max() <= share:
        return np.ones_like(num_keys)  # many short ones fill the device evenly
    # In float64 throughout, and without np.clip: each conversion and each check takes longer than the arithmetic.
    keys = num_keys.astype(np.float64)
    most_pieces = np.maximum(1.0, keys // MIN_PIECE_KEYS)
    pieces = np.ceil(keys / (share * _SHARES[_most_waves(total_programs, num_concurrent)]))
    np.minimum(np.maximum(pieces, 1.0, out=pieces), most_pieces, out=pieces)
    # A piece that none of a tile's rows sees is no program.
    seen = work / keys
    programs = pieces @ seen + (total_programs - seen.sum())
    waves = np.ceil(programs / num_concurrent)
    longest = (keys / pieces).max(axis=1)
    times = np.maximum(longest + _START_KEYS, waves * (total_work / programs + _START_KEYS))
    # Fewer pieces leave fewer results to merge, so the first length that is about as good as the best is taken.
    chosen: NDArray[np.int64] = pieces[(times <= 1.03 * times.min()).argmax()].astype(np.int64)
    return chosen


def max_pieces(tile_rows: int, num_tiles: int, num_kv_heads: int, tiling: Tiling) -> int:
    """How many items of a tile class `num_pieces` makes at most, beyond one for each of the ``num_tiles`` tiles."""
    num_concurrent = tiling.num_concurrent(tile_rows)
    return -(-_most_waves(num_tiles * num_kv_heads, num_concurrent) * num_concurrent // num_kv_heads)


def whole_from(num_kv_heads: int, tiling: Tiling) -> int:
    """The number of decoding rows, sharing nothing, from which on no row is split, unless some are much longer than others.

    Args:
        num_kv_heads: of the layers that have the fewest.
    """
    return -(-_MAX_WAVES * tiling.num_concurrent(TILE_ROWS[0]) // num_kv_heads)


def _most_waves(num_programs: int, num_concurrent: int) -> int:
    """Few programs are cut into one wave, which leaves at most a fifth of the device idle; more may need several waves."""
    return _MAX_WAVES if num_programs * _MAX_WAVES > num_concurrent else 1


def max_partials(num_rows: int, num_tiles: dict[int, int], group: int, num_kv_heads: int, tiling: Tiling) -> int:
    """The most rows of partial results of a batch: per row one for each tree level and one for the tail, and those of pieces.

    Args:
        num_rows: of the batch.
        num_tiles: the most tiles over ranges, by tile rows.
    """
    pieces = sum(
        max_pieces(rows, count, num_kv_heads, tiling) * min(num_rows, rows // group)
        for rows, count in num_tiles.items()
    )
    return num_rows * (MAX_LEVELS + 1) + pieces


def max_tiles(num_rows: int, group: int, dtype: torch.dtype, tiling: Tiling) -> dict[int, int]:
    """The most tiles over the ranges of any batch of ``num_rows`` rows, by tile rows, whatever tree its sequences form.

    With one class, a batch has the tiles of only one of the entries.
    """
    apart = replace(tiling, one_class=False, widest_tile=_WIDEST_IN_DECODING) if tiling.one_class else tiling
    classes = np.unique(tile_classes(np.arange(1, num_rows + 1), group, dtype, apart)).tolist()
    tiles, fewest_rows = {}, 1
    for index in classes:
        tile_rows = TILE_ROWS[index]
        if tiling.one_class:
            fewest_rows = 1
        # Ranges of one level have no row in common. A range takes this class if it has too many rows for the narrower one,
        # and a shared range has at least two rows. Only in the widest class can a range have several tiles.
        shared, private = num_rows // max(2, fewest_rows), num_rows // fewest_rows
        more = num_rows // (tile_rows // group) if index == classes[-1] else 0
        tiles[tile_rows] = MAX_LEVELS * (shared + more) + private + more
        fewest_rows = tile_rows // group + 1
    return tiles


def partials_nbytes(num_rows: int, heads: Iterable[tuple[int, LayerShape]], dtype: torch.dtype, tiling: Tiling) -> int:
    """Bytes of the partial results that any batch of so many rows may need, of all shapes of heads together.

    Args:
        num_rows: of the batch.
        heads: query heads of a layer, and what the layer stores per token; each pair once.
        dtype: of queries.
    """
    nbytes = 0
    for num_query_heads, num_kv_heads, value_dim in {
        (count, each.num_kv_heads, each.value_dim) for count, each in heads
    }:
        group = num_query_heads // num_kv_heads
        tiles = max_tiles(num_rows, group, dtype, tiling)
        nbytes += 4 * max_partials(num_rows, tiles, group, num_kv_heads, tiling) * num_query_heads * (value_dim + 1)
    return nbytes
