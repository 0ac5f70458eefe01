"""When sharing and splitting pay on a GPU.

Reading keys and values is what decoding costs, so every rule weighs bytes. Still to be measured on a GPU: what two more
launches cost (`MIN_SAVED_BYTES`) and from which length a split pays (`MIN_PIECE_KEYS`). The others follow from counts.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.attention.plan import SharingRule
from radixkv_kernels import TILE_ROWS

# Programs of a tile class that run on one multiprocessor at once. From the compilers' reports for sm_90, bfloat16 and heads
# of 128: Triton 3.6 takes 150 registers x 128 threads, 206 x 128 and 202 x 256 of 65,536; Triton 3.9 takes 157, 246 and
# 217. Of shared memory they take 70, 112 and 128 KiB of 227.
PROGRAMS_PER_MULTIPROCESSOR = {16: 3, 64: 2, 128: 1}

_TILE_ROWS = np.array(TILE_ROWS)

# A piece writes partial results of about a kilobyte per head and waits for its keys' latency before the first is done.
MIN_PIECE_KEYS = 256

# Sharing takes a launch for the shared tiles and one for the merge that a flat batch does without; in some 8 us a GPU
# reads this much.
MIN_SAVED_BYTES = 32 * 2**20


def sharing_rule(max_sequences: int, group: int, element_bytes: int, bytes_per_token: int) -> SharingRule:
    """A shared prefix gets work items of its own where that saves more than it costs.

    A decoding batch has any of them only where all of them save more than the additional launches cost.

    Args:
        max_sequences: in a batch.
        group: query heads per key-value head, of most layers.
        element_bytes: of a stored key or value's elements.
        bytes_per_token: of a token's keys and values in one layer.
    """
    counts = range(2, max_sequences + 1)
    min_tokens = (0, 0, *(min_shared_tokens(count, group, element_bytes) for count in counts))
    return SharingRule(min_tokens, -(-MIN_SAVED_BYTES // bytes_per_token))


def min_shared_tokens(num_sequences: int, group: int, element_bytes: int) -> int:
    """How long a prefix that ``num_sequences``, 2 or more, share must be.

    It saves reading k - 1 of k times, ``(k - 1) * tokens * kv heads * 2 dim`` elements, and costs writing and reading back
    float32 partial results, ``2 * k * kv heads * group * dim`` of 4 bytes. It must save more than it costs.
    """
    return 4 * group * num_sequences // ((num_sequences - 1) * element_bytes) + 1


def tile_classes(num_rows: NDArray[np.int64], group: int, dtype: torch.dtype) -> NDArray[np.int64]:
    """Indices into `TILE_ROWS` for so many query rows with ``group`` heads each: the narrowest that holds them, or the last.

    float32 is multiplied without tensor cores, from registers; wider tiles than a group needs would only spill.
    """
    most = np.full(len(num_rows), group) if dtype == torch.float32 else num_rows * group
    return _TILE_ROWS[:-1].searchsorted(most)


def num_pieces(
    num_keys: NDArray[np.int64],
    num_tiles: NDArray[np.int64],
    num_kv_heads: int,
    tile_class: NDArray[np.int64],
    multiprocessors: int,
) -> NDArray[np.int64]:
    """Into how many pieces each range of keys is split, so that one launch of a tile class fills the GPU once, evenly.

    Args:
        num_keys: of each range.
        num_tiles: row tiles over each range; each tile and head is a program per piece.
        tile_class: of each range, see `tile_classes`.
    """
    at_once = multiprocessors * np.array([PROGRAMS_PER_MULTIPROCESSOR[rows] for rows in TILE_ROWS])
    work = np.bincount(tile_class, weights=num_keys * num_tiles, minlength=len(TILE_ROWS)) * num_kv_heads
    piece = np.maximum(MIN_PIECE_KEYS, work / at_once)
    pieces: NDArray[np.float64] = np.maximum(1, np.rint(num_keys / piece[tile_class]))
    return pieces.astype(np.int64)
