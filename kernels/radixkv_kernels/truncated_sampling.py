"""One token per row, drawn from the tokens that min_p, top_k and top_p leave; nothing is sorted.

A token is left if its weight, ``exp(logit / temperature - the largest)``, is above a cut; of those equal to the cut, the
lowest ids are left. A cut is found by comparing all weights with several pivots at a time: the number of weights at or above
each, or their sum. Each pass also notes the next weights on either side of its pivots, so that the search ends exactly at an
existing weight.

Such passes over a whole vocabulary would take long. So the few candidates are written to a list first, by a bound that costs
next to nothing, and the list is searched (compare FlashInfer's rejection sampling, Ye et al. 2025, which draws again until a
pivot holds)::

    logits of a row   | 4,096 = 64 blocks | 4,096 | ...    per program: largest logit and sum of each block of 64 ids
                                 \\         /
                        one program per row: the largest of all, the sum, the bound
                                 /         \\
    logits of a row   | 4,096             | 4,096 | ...    per program: how many reach the bound
    logits of a row   | 4,096             | 4,096 | ...    per program: writes them after those of the parts before it
                                 \\         /
    candidates        | id and weight of each, by ids |    one program per row: cut of top_k, cut of top_p, race

    bound   min_p                          itself
            top_k                          the k-th of the blocks' largest: k weights are at least that
            top_p alone                    all weights below it together are less than what top_p removes

Random numbers are those of `exponential_sampling`: of each id, whatever is beside it.

Bytes moved: a row is read once, ``4 * rows * vocabulary``, and twice again only where blocks have candidates; each candidate
is written, 8 bytes, and its weight read by every pass of a search, mostly from caches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv_kernels.checks import check_tensor
from radixkv_kernels.exponential_sampling import PART_IDS, check_draw, exponential, load_scaled, random_bits
from radixkv_kernels.target import COMPILE_OPTIONS

# Half a warp reads a block in one instruction, 16 bytes a thread, where 16 divides the vocabulary: kernels are specialised
# on that, for the compiler.
_BLOCK_IDS = 64
_BLOCKS = PART_IDS // _BLOCK_IDS
# Lanes of the bound of top_k: one for each block, up to 262,144 ids. Of more, several share a lane.
_MAX_LANES = 4096
# Each narrows the bound eightfold, in the end to 2 % of a weight: an exact one would save few candidates.
_BOUND_STEPS = 4
# Candidates at a time: two per thread of 16 warps, so that what is kept of them for every pivot stays in registers, and two
# programs fit on a multiprocessor of sm_90.
_CHUNK = 1024
# Of those that are compared with a cut; in the first pass as well, or with chunks read ahead, registers spill on sm_100.
_CUT_CHUNK = 4096
# Pivots per pass. More would cost more arithmetic than the passes that they save.
_PIVOTS = 4

# float32's infinity and 1.0. Numbers from 0 on are in the order of their bits.
_INFINITY = tl.constexpr(0x7F800000)
_ONE = tl.constexpr(0x3F800000)


@triton.jit
def _weigh_blocks(
    logits, temperatures, block_largest, block_sums, vocab_size, logits_row_stride, num_parts,
    BLOCKS: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """One program: one part of one row. Sums are of exponentials, relative to the block's largest."""
    row = tl.program_id(0)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    token_id = block[:, None] * IDS + tl.arange(0, IDS)[None, :]
    scaled = load_scaled(logits, temperatures, row, token_id, token_id < vocab_size, logits_row_stride)
    largest = tl.max(scaled, 1)
    # Where all are barred, anything finite will do in place of minus infinity.
    base = tl.where(largest == float("-inf"), 0.0, largest)
    out = row.to(tl.int64) * (num_parts * BLOCKS) + block
    tl.store(block_largest + out, largest)
    tl.store(block_sums + out, tl.sum(tl.exp(scaled - base[:, None]), 1))


@triton.jit
def _find_bound(
    min_p, top_k, top_p, block_largest, block_sums, tops, sums, bounds, vocab_size, num_parts,
    LANES: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One program: one row. The bound is of scaled logits, which both kernels compare with it: one counts, one writes."""
    row = tl.program_id(0)
    num_blocks = num_parts * BLOCKS
    own = row.to(tl.int64) * num_blocks
    lane = tl.arange(0, LANES)
    largest = tl.full([LANES], float("-inf"), tl.float32)
    mass = tl.zeros([LANES], tl.float32)
    for first in tl.range(0, num_blocks, LANES):
        block = first + lane
        more = tl.load(block_largest + own + block, mask=block < num_blocks, other=float("-inf"))
        block_sum = tl.load(block_sums + own + block, mask=block < num_blocks, other=0.0)
        new_largest = tl.maximum(largest, more)
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        mass = mass * tl.exp(largest - base) + block_sum * tl.exp(more - base)
        largest = new_largest
    top = tl.max(largest, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(mass * tl.exp(largest - top), 0)

    least = tl.load(min_p + row)
    most = tl.load(top_k + row)
    part = tl.load(top_p + row)
    # How far below the largest candidates may be.
    reach = float("inf")
    if most < vocab_size:
        depth = top - largest
        near = 0.0
        for _ in tl.static_range(STEPS):
            # Not below what float32 can tell from zero: below that, all weights are candidates.
            pivots = near + (tl.minimum(reach, 80.0) - near) * ((1 + tl.arange(0, 8)) * 0.125)
            enough = tl.sum((depth[None, :] <= pivots[:, None]).to(tl.int32), 1) >= most
            near = tl.maximum(near, tl.max(tl.where(enough, 0.0, pivots), 0))
            reach = tl.minimum(reach, tl.min(tl.where(enough, pivots, float("inf")), 0))
    elif least == 0.0:
        least = 0.9 * (1.0 - part) * total / vocab_size
    # Smaller ones are hardly a bound, and have no logarithm that is exact.
    reach = tl.where(least >= 1e-37, tl.minimum(reach, -tl.log(tl.maximum(least, 1e-37))), reach)
    tl.store(tops + row, top)
    tl.store(sums + row, total)
    # A little lower, by more than any rounding: the kernel that draws compares exactly.
    tl.store(bounds + row, top - reach - (1e-4 + 1e-6 * tl.abs(top)))


@triton.jit
def _find_candidates(
    logits, temperatures, block_largest, bounds, row, part, vocab_size, logits_row_stride, num_parts,
    BLOCKS: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """Ids and scaled logits of a part ``[blocks, ids]``, and which reach the bound. Other blocks are not read."""
    bound = tl.load(bounds + row)
    block = part * BLOCKS + tl.arange(0, BLOCKS)
    reaches = tl.load(block_largest + row.to(tl.int64) * (num_parts * BLOCKS) + block) >= bound
    token_id = block[:, None] * IDS + tl.arange(0, IDS)[None, :]
    exists = (token_id < vocab_size) & reaches[:, None]
    scaled = load_scaled(logits, temperatures, row, token_id, exists, logits_row_stride)
    return token_id, scaled, exists & (scaled >= bound)


@triton.jit
def _count_candidates(
    logits, temperatures, block_largest, bounds, counts, vocab_size, logits_row_stride, num_parts,
    BLOCKS: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """One program: one part of one row."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    _token_id, _scaled, found = _find_candidates(
        logits, temperatures, block_largest, bounds, row, part, vocab_size, logits_row_stride, num_parts, BLOCKS, IDS
    )
    tl.store(counts + row.to(tl.int64) * num_parts + part, tl.sum(tl.sum(found.to(tl.int32), 1), 0))


@triton.jit
def _write_candidates(
    logits, temperatures, block_largest, bounds, tops, counts, ids, weights, vocab_size, logits_row_stride, num_parts,
    row_stride, PARTS: tl.constexpr, BLOCKS: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """One program: one part of one row. Ascending ids."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.arange(0, PARTS)
    before = tl.load(counts + row.to(tl.int64) * num_parts + parts, mask=parts < part, other=0)
    if tl.load(counts + row.to(tl.int64) * num_parts + part) > 0:
        token_id, scaled, found = _find_candidates(
            logits, temperatures, block_largest, bounds, row, part, vocab_size, logits_row_stride, num_parts, BLOCKS, IDS
        )  # fmt: skip
        number = found.to(tl.int32)
        in_block = tl.sum(number, 1)
        start = tl.sum(before, 0) + tl.cumsum(in_block, 0) - in_block
        at = start[:, None] + tl.cumsum(number, 1) - number
        own = row.to(tl.int64) * row_stride
        tl.store(ids + own + at, token_id, mask=found)
        tl.store(weights + own + at, tl.minimum(tl.exp(scaled - tl.load(tops + row)), 1.0), mask=found)


@triton.jit
def _at_least(weights, count, pivot, CHUNK: tl.constexpr):
    """Of the weights that are not below ``pivot``: their number, sum and least."""
    number = tl.zeros([CHUNK], tl.int32)
    mass = tl.zeros([CHUNK], tl.float32)
    above = tl.full([CHUNK], float("inf"), tl.float32)
    for first in tl.range(0, count, CHUNK):
        at = first + tl.arange(0, CHUNK)
        weight = tl.load(weights + at, mask=at < count, other=-1.0)
        reaches = weight >= pivot
        number += reaches.to(tl.int32)
        mass += tl.where(reaches, weight, 0.0)
        above = tl.minimum(above, tl.where(reaches, weight, float("inf")))
    return tl.sum(number, 0), tl.sum(mass, 0), tl.min(above, 0)


@triton.jit
def _beyond(weights, count, cut, CHUNK: tl.constexpr):
    """Number and sum of the weights above ``cut``, and the number of those equal to it."""
    number = tl.zeros([CHUNK], tl.int32)
    mass = tl.zeros([CHUNK], tl.float32)
    equal = tl.zeros([CHUNK], tl.int32)
    for first in tl.range(0, count, CHUNK):
        at = first + tl.arange(0, CHUNK)
        weight = tl.load(weights + at, mask=at < count, other=-1.0)
        number += (weight > cut).to(tl.int32)
        mass += tl.where(weight > cut, weight, 0.0)
        equal += (weight == cut).to(tl.int32)
    return tl.sum(number, 0), tl.sum(mass, 0), tl.sum(equal, 0)


@triton.jit
def _find_cut(weights, count, cut, wanted, BY_MASS: tl.constexpr, PIVOTS: tl.constexpr, CHUNK: tl.constexpr):
    """The largest weight with ``wanted`` at or above it, a number of tokens or their sum; ``cut`` if none has.

    ``cut`` is a weight that there is. Weights are compared by their bits, as integers: a pass leaves a fifth of those from
    ``low`` to ``high``, or fewer, and at least one less, so that a search ends whatever the weights are.
    """
    low = cut.to(tl.int32, bitcast=True)
    high = tl.full([], _ONE, tl.int32)
    while low < high:
        pivots = low + 1 + (high - low - 1) // (PIVOTS + 1) * (1 + tl.arange(0, PIVOTS)[:, None])
        amount = tl.zeros([PIVOTS, CHUNK], tl.float32 if BY_MASS else tl.int32)
        above = tl.full([PIVOTS, CHUNK], _INFINITY, tl.int32)
        below = tl.full([PIVOTS, CHUNK], 0, tl.int32)
        for first in tl.range(0, count, CHUNK):
            at = first + tl.arange(0, CHUNK)[None, :]
            weight = tl.load(weights + at, mask=at < count, other=-1.0)
            bits = weight.to(tl.int32, bitcast=True)
            reaches = bits >= pivots
            amount += tl.where(reaches, weight, 0.0) if BY_MASS else reaches.to(tl.int32)
            above = tl.minimum(above, tl.where(reaches, bits, _INFINITY))
            below = tl.maximum(below, tl.where(reaches, 0, bits))
        enough = tl.sum(amount, 1) >= wanted
        # Where nothing is wanted, as with weights of 0, nothing is enough.
        low_found = tl.minimum(tl.max(tl.where(enough, tl.min(above, 1), low), 0), high)
        high = tl.min(tl.where(enough, high, tl.max(below, 1)), 0)
        low = low_found
    return low.to(tl.float32, bitcast=True)


@triton.jit
def _find_tie(weights, count, cut, ties, CHUNK: tl.constexpr):
    """Where the last of the first ``ties`` weights that are equal to ``cut`` is."""
    last = -1
    seen = 0
    first = 0
    while (seen < ties) & (first < count):
        at = first + tl.arange(0, CHUNK)
        equal = (tl.load(weights + at, mask=at < count, other=-1.0) == cut).to(tl.int32)
        stays = (equal > 0) & (seen + tl.cumsum(equal, 0) <= ties)
        last = tl.maximum(last, tl.max(tl.where(stays, at, -1), 0))
        seen += tl.sum(equal, 0)
        first += CHUNK
    return last


@triton.jit(do_not_specialize=["vocab_size"])
def _draw_candidate(
    rng_states, min_p, top_k, top_p, ids, weights, counts, sums, token_ids, vocab_size, num_parts, row_stride,
    PARTS: tl.constexpr, PIVOTS: tl.constexpr, CHUNK: tl.constexpr, CUT_CHUNK: tl.constexpr,
):  # fmt: skip
    """One program: one row, from its candidates."""
    row = tl.program_id(0)
    own = row.to(tl.int64) * row_stride
    weights += own
    ids += own
    parts = tl.arange(0, PARTS)
    count = tl.sum(tl.load(counts + row.to(tl.int64) * num_parts + parts, mask=parts < num_parts, other=0), 0)
    least = tl.load(min_p + row)
    most = tl.load(top_k + row)
    part = tl.load(top_p + row)

    # What is left: weights above the cut, and of those equal to it, by ascending ids, so many.
    number, mass, cut = _at_least(weights, count, least, CHUNK)
    ties = vocab_size
    equal = 0
    if most < number:
        cut = _find_cut(weights, count, cut, most, False, PIVOTS, CHUNK)
        number, mass, equal = _beyond(weights, count, cut, CUT_CHUNK)
        ties = most - number
        mass += ties * cut
    if part < 1.0:
        if (least == 0.0) & (most >= vocab_size):
            mass = tl.load(sums + row)
        wanted = part * mass
        new_cut = _find_cut(weights, count, cut, wanted, True, PIVOTS, CHUNK)
        _number, beyond, equal = _beyond(weights, count, new_cut, CUT_CHUNK)
        # Each stays while those before it are less than wanted; the first of a row always does.
        needed = tl.ceil((wanted - beyond) / new_cut)
        needed = tl.minimum(tl.maximum(needed, 1.0), equal.to(tl.float32)).to(tl.int32)
        ties = tl.where(new_cut == cut, tl.minimum(ties, needed), needed)
        cut = new_cut
    last = count
    if ties < equal:
        last = _find_tie(weights, count, cut, ties, CHUNK)

    state = tl.load(rng_states + row).to(tl.uint64, bitcast=True)
    best = tl.full([CHUNK], -1.0, tl.float32)
    drawn = tl.zeros([CHUNK], tl.int32)
    for first in tl.range(0, count, CHUNK):
        at = first + tl.arange(0, CHUNK)
        weight = tl.load(weights + at, mask=at < count, other=-1.0)
        token_id = tl.load(ids + at, mask=at < count, other=0)
        is_left = (weight > cut) | ((weight == cut) & (at <= last))
        ratio = tl.where(is_left, weight / exponential(random_bits(state, 1 + token_id.to(tl.int64))), -1.0)
        drawn = tl.where(ratio > best, token_id, drawn)
        best = tl.maximum(best, ratio)
    tl.store(token_ids + row, tl.min(tl.where(best == tl.max(best, 0), drawn, vocab_size), 0).to(tl.int64))


def draw_truncated(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    rng_states: torch.Tensor,
    *,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """Draw one token for each row of those that min_p, top_k and top_p leave, in that order.

    Among equally likely tokens, those with the lowest ids are left.

    Args:
        logits: as of `draw_tokens`.
        temperatures: likewise.
        rng_states: likewise.
        min_p: float32 ``[rows]``, 0 to 1: tokens with at least this fraction of the likeliest one's probability.
        top_k: int32 ``[rows]``, at least 1: so many of the likeliest.
        top_p: float32 ``[rows]``, above 0, up to 1: each while the likelier ones together have less than this fraction of
            what is left.

    Returns:
        Token ids, int64 ``[rows]``; any token for a row without a finite logit.

    Raises:
        ValueError: a shape, type, device or stride that the kernel cannot take.
    """
    check_draw(logits, temperatures, rng_states)
    device = logits.device
    num_rows, vocab_size = logits.shape
    for name, column in (("min_p", min_p), ("top_p", top_p)):
        check_tensor(name, column, (num_rows,), (torch.float32,), device)
    check_tensor("top_k", top_k, (num_rows,), (torch.int32,), device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return token_ids
    num_parts = triton.cdiv(vocab_size, PART_IDS)
    # Apart, so that each begins on 16 bytes whatever the number of rows.
    block_largest, block_sums = (
        torch.empty(num_rows, num_parts * _BLOCKS, dtype=torch.float32, device=device) for _ in range(2)
    )
    tops, sums, bounds = (torch.empty(num_rows, dtype=torch.float32, device=device) for _ in range(3))
    counts = torch.empty(num_rows, num_parts, dtype=torch.int32, device=device)
    ids = torch.empty(num_rows, vocab_size, dtype=torch.int32, device=device)
    weights = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=device)
    truncation = min_p, top_k, top_p
    shape = vocab_size, logits.stride(0), num_parts
    by_rows, by_parts = (num_rows,), (num_rows, num_parts)
    cut = {"BLOCKS": _BLOCKS, "IDS": _BLOCK_IDS, **COMPILE_OPTIONS}
    parts = triton.next_power_of_2(num_parts)
    lanes = min(parts * _BLOCKS, _MAX_LANES)
    _weigh_blocks[by_parts](logits, temperatures, block_largest, block_sums, *shape, num_warps=8, **cut)
    _find_bound[by_rows](
        *truncation, block_largest, block_sums, tops, sums, bounds, vocab_size, num_parts,
        LANES=lanes, BLOCKS=_BLOCKS, STEPS=_BOUND_STEPS, num_warps=16, **COMPILE_OPTIONS,
    )  # fmt: skip
    _count_candidates[by_parts](logits, temperatures, block_largest, bounds, counts, *shape, num_warps=8, **cut)
    _write_candidates[by_parts](
        logits, temperatures, block_largest, bounds, tops, counts, ids, weights, *shape, ids.stride(0),
        PARTS=parts, num_warps=16, **cut,
    )  # fmt: skip
    _draw_candidate[by_rows](
        rng_states, *truncation, ids, weights, counts, sums, token_ids, vocab_size, num_parts, ids.stride(0),
        PARTS=parts, PIVOTS=_PIVOTS, CHUNK=_CHUNK, CUT_CHUNK=_CUT_CHUNK, num_warps=16, **COMPILE_OPTIONS,
    )  # fmt: skip
    return token_ids
