"""One token per row, drawn from what min_p, top_k and top_p leave of a vocabulary; nothing is sorted.

A token is left if its weight, ``exp(logit / temperature - the largest)``, is above a cut, or equal to it and its id one of
the lowest of those. A cut is found by bisection: how many weights, or how much of them, are at or above a pivot. Each pass
also sees the next weights on either side of its pivot, so that the search ends at a weight that there is, exactly.

Passes over a whole vocabulary would take a hundred microseconds together. So the first kernel reads it twice and writes down
the few tokens that can be left at all, by bounds that cost next to nothing; the second one, a program per row as well,
searches among those (compare FlashInfer's rejection sampling, Ye et al. 2025, which draws again until a pivot holds)::

    logits of a row   | ............................................. |   largest, sum, the largest of each lane
    candidates        | id and weight of each that is at least the bound |   cut of top_k, cut of top_p, race

    bound   min_p                          itself
            top_k                          the k-th of the lanes' largest: k weights are at least that
            top_p, where it is alone       all weights below it together are less than half of what top_p removes

Random numbers are those of `exponential_sampling`: of each id, whatever is beside it.

Bytes moved: a row is read twice, the second time mostly from the L2 cache: ``4 * rows * vocabulary`` or a little more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv_kernels.checks import check_device, check_tensor
from radixkv_kernels.exponential_sampling import exponential, random_bits, scale_logit
from radixkv_kernels.target import COMPILE_OPTIONS

_LANES = 4096
# Of candidates at a time; mostly there are fewer.
_CANDIDATES = 1024
# Halvings, in logarithms, of the lanes' largest weights: a bound need not be exact.
_BOUND_STEPS = 14


@triton.jit
def _between(low, high):
    """A pivot above ``low``, up to ``high``: the mean of their logarithms."""
    pivot = tl.where(low > 0.0, tl.sqrt(low) * tl.sqrt(high), high * 0.5)
    return tl.where((pivot <= low) | (pivot > high), high, pivot)


@triton.jit(do_not_specialize=["vocab_size"])
def _find_candidates(
    logits, temperatures, min_p, top_k, top_p, ids, weights, counts, sums, vocab_size, logits_row_stride, row_stride,
    LANES: tl.constexpr, BOUND_STEPS: tl.constexpr,
):  # fmt: skip
    """One program: one row. Ascending ids."""
    row = tl.program_id(0)
    own = logits + row.to(tl.int64) * logits_row_stride
    ids += row.to(tl.int64) * row_stride
    weights += row.to(tl.int64) * row_stride
    temperature = tl.load(temperatures + row)
    lane = tl.arange(0, LANES)

    largest = tl.full([LANES], float("-inf"), tl.float32)
    mass = tl.zeros([LANES], tl.float32)
    for first in tl.range(0, vocab_size, LANES):
        token_id = first + lane
        logit = tl.load(own + token_id, mask=token_id < vocab_size, other=float("-inf"))
        scaled = scale_logit(logit, temperature)
        new_largest = tl.maximum(largest, scaled)
        # A lane that has seen only barred tokens: anything finite will do in place of minus infinity.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        mass = mass * tl.exp(largest - base) + tl.exp(scaled - base)
        largest = new_largest
    top = tl.max(largest, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    lane_weight = tl.exp(largest - top)
    total = tl.sum(mass * lane_weight, 0)

    least = tl.load(min_p + row)
    most = tl.load(top_k + row)
    part = tl.load(top_p + row)
    bound = least
    if most < vocab_size:
        if most <= LANES:
            low = 0.0
            high = 1.0
            for _ in tl.range(0, BOUND_STEPS):
                # From a weight on that float32 tells from nothing: lower ones are all candidates.
                pivot = _between(tl.maximum(low, 1e-30), high)
                enough = tl.sum((lane_weight >= pivot).to(tl.int32), 0) >= most
                low = tl.where(enough, pivot, low)
                high = tl.where(enough, high, pivot)
            # The weights below may be rounded once less.
            bound = tl.maximum(bound, low * 0.99999)
    elif least == 0.0:
        bound = 0.5 * (1.0 - part) * total / vocab_size

    count = 0
    for first in tl.range(0, vocab_size, LANES):
        token_id = first + lane
        exists = token_id < vocab_size
        logit = tl.load(own + token_id, mask=exists, other=float("-inf"))
        weight = tl.exp(scale_logit(logit, temperature) - top)
        found = ((weight >= bound) & exists).to(tl.int32)
        at = count + tl.cumsum(found, 0) - found
        tl.store(ids + at, token_id, mask=found > 0)
        tl.store(weights + at, weight, mask=found > 0)
        count += tl.sum(found, 0)
    tl.store(counts + row, count)
    tl.store(sums + row, total)


@triton.jit
def _at_least(weights, count, pivot, CANDIDATES: tl.constexpr):
    """Of the weights that are not below ``pivot``: their number, sum and least; and the largest of the others."""
    number = 0
    mass = 0.0
    above = float("inf")
    below = -1.0
    for first in tl.range(0, count, CANDIDATES):
        at = first + tl.arange(0, CANDIDATES)
        weight = tl.load(weights + at, mask=at < count, other=-1.0)
        reaches = weight >= pivot
        number += tl.sum(reaches.to(tl.int32), 0)
        mass += tl.sum(tl.where(reaches, weight, 0.0), 0)
        above = tl.minimum(above, tl.min(tl.where(reaches, weight, float("inf")), 0))
        below = tl.maximum(below, tl.max(tl.where(reaches, -1.0, weight), 0))
    return number, mass, above, below


@triton.jit
def _beyond(weights, count, cut, CANDIDATES: tl.constexpr):
    """Number and sum of the weights above ``cut``, and the number of those equal to it."""
    number = 0
    mass = 0.0
    equal = 0
    for first in tl.range(0, count, CANDIDATES):
        at = first + tl.arange(0, CANDIDATES)
        weight = tl.load(weights + at, mask=at < count, other=-1.0)
        number += tl.sum((weight > cut).to(tl.int32), 0)
        mass += tl.sum(tl.where(weight > cut, weight, 0.0), 0)
        equal += tl.sum((weight == cut).to(tl.int32), 0)
    return number, mass, equal


@triton.jit
def _find_cut(weights, count, low, wanted, BY_MASS: tl.constexpr, CANDIDATES: tl.constexpr):
    """The largest weight with ``wanted`` at or above it, a number of tokens or their sum; ``low`` if none has.

    ``low`` is a weight that there is.
    """
    high = 2.0
    while low < high:
        pivot = _between(low, high)
        number, mass, above, below = _at_least(weights, count, pivot, CANDIDATES)
        enough = mass >= wanted if BY_MASS else number >= wanted
        low = tl.where(enough, above, low)
        high = tl.where(enough, high, below)
    return low


@triton.jit(do_not_specialize=["vocab_size"])
def _draw_candidate(
    rng_states, min_p, top_k, top_p, ids, weights, counts, sums, token_ids, vocab_size, row_stride,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    """One program: one row, from its candidates."""
    row = tl.program_id(0)
    own = row.to(tl.int64) * row_stride
    weights += own
    ids += own
    count = tl.load(counts + row)
    least = tl.load(min_p + row)
    most = tl.load(top_k + row)
    part = tl.load(top_p + row)

    # What is left: weights above the cut, and of those equal to it, by ascending ids, so many.
    number, mass, cut, _below = _at_least(weights, count, least, CANDIDATES)
    ties = vocab_size
    if most < number:
        cut = _find_cut(weights, count, cut, most, False, CANDIDATES)
        number, mass, _equal = _beyond(weights, count, cut, CANDIDATES)
        ties = most - number
        mass += ties * cut
    if part < 1.0:
        if (least == 0.0) & (most >= vocab_size):
            mass = tl.load(sums + row)
        wanted = part * mass
        new_cut = _find_cut(weights, count, cut, wanted, True, CANDIDATES)
        _number, beyond, equal = _beyond(weights, count, new_cut, CANDIDATES)
        # Each stays while those before it are less than wanted; the first of a row always does.
        needed = tl.ceil((wanted - beyond) / new_cut)
        needed = tl.minimum(tl.maximum(needed, 1.0), equal.to(tl.float32)).to(tl.int32)
        ties = tl.where(new_cut == cut, tl.minimum(ties, needed), needed)
        cut = new_cut

    state = tl.load(rng_states + row).to(tl.uint64, bitcast=True)
    best = -1.0
    drawn = 0
    seen = 0
    for first in tl.range(0, count, CANDIDATES):
        at = first + tl.arange(0, CANDIDATES)
        weight = tl.load(weights + at, mask=at < count, other=-1.0)
        token_id = tl.load(ids + at, mask=at < count, other=0)
        equal = (weight == cut).to(tl.int32)
        is_left = (weight > cut) | ((equal > 0) & (seen + tl.cumsum(equal, 0) <= ties))
        ratio = weight / exponential(random_bits(state, 1 + token_id.to(tl.int64)))
        ratio, winner = tl.max(tl.where(is_left, ratio, -1.0), 0, return_indices=True)
        winner = tl.sum(tl.where(at == first + winner, token_id, 0), 0)
        drawn = tl.where(ratio > best, winner, drawn)
        best = tl.maximum(best, ratio)
        seen += tl.sum(equal, 0)
    tl.store(token_ids + row, drawn)


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

    Of tokens that are as likely as one another, those of the lowest ids are left.

    Args:
        logits: as of `draw_tokens`.
        temperatures: likewise.
        rng_states: likewise.
        min_p: float32 ``[rows]``, 0 to 1: tokens at least so likely, as a part of the likeliest one's probability.
        top_k: int32 ``[rows]``, at least 1: so many of the likeliest.
        top_p: float32 ``[rows]``, above 0, up to 1: each while the likelier ones together have less than this part of what is
            left.

    Returns:
        Token ids, int64 ``[rows]``; of a row that is not of numbers, any.

    Raises:
        ValueError: a shape, type, device or stride that the kernel cannot take.
    """
    device = logits.device
    check_device("logits", device)
    check_tensor("logits", logits, (None, None), (torch.float32,), device)
    num_rows, vocab_size = logits.shape
    for name, column in (("temperatures", temperatures), ("min_p", min_p), ("top_p", top_p)):
        check_tensor(name, column, (num_rows,), (torch.float32,), device)
    check_tensor("rng_states", rng_states, (num_rows,), (torch.int64,), device)
    check_tensor("top_k", top_k, (num_rows,), (torch.int32,), device)
    if vocab_size == 0:
        raise ValueError(f"logits: expected at least one token, got {list(logits.shape)}")
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return token_ids
    ids = torch.empty(num_rows, vocab_size, dtype=torch.int32, device=device)
    weights = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=device)
    counts = torch.empty(num_rows, dtype=torch.int32, device=device)
    sums = torch.empty(num_rows, dtype=torch.float32, device=device)
    truncation, candidates = (min_p, top_k, top_p), (ids, weights, counts, sums)
    _find_candidates[(num_rows,)](
        logits, temperatures, *truncation, *candidates, vocab_size, logits.stride(0), ids.stride(0),
        LANES=_LANES, BOUND_STEPS=_BOUND_STEPS, num_warps=16, **COMPILE_OPTIONS,
    )  # fmt: skip
    _draw_candidate[(num_rows,)](
        rng_states, *truncation, *candidates, token_ids, vocab_size, ids.stride(0),
        CANDIDATES=_CANDIDATES, num_warps=8, **COMPILE_OPTIONS,
    )  # fmt: skip
    return token_ids
