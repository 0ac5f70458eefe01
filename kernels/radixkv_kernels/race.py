"""One token a row, drawn from a whole vocabulary in one reading of its logits.

Two exponential races (an exponential variate each, the largest ratio of probability to variate wins; equivalent to Gumbel-max
sampling): one between blocks of 256 neighbouring token ids, by the probability that a block has in all, and one between the
ids of the block that won. So a vocabulary of 128,000 takes 756 variates rather than as many as ids::

    logits of a row   | 4,096 = 16 blocks | 4,096 | ...   a program each: its largest logit, the block that wins, its ratio
                                 \\         /
                        a program a row: the block of blocks, ratios brought to one largest logit; then its ids

Variates are a pure function of the row's ``start`` and the id, by SplitMix64 (Steele, Lea, Flood 2014) counted up by ids and
down by blocks.

Bytes moved: each logit is read once, ``4 * rows * vocabulary``; the floor on a GPU of B bytes/s is that over B (256 rows of
128,000 tokens: 131 MB, 30 us at 4.3 TB/s).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv_kernels.checks import MAX_PROGRAMS_ACROSS, check_at_most, check_device, check_tensor

BLOCK_IDS = 256
_BLOCKS = 16


@triton.jit
def _random_bits(start, count):
    """64 of them for each of the counts."""
    x = start + count.to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _exponential(bits):
    """Variates of mean 1 from 64 random bits, with full relative precision where they are small, for those decide races."""
    uniform = (bits >> 11).to(tl.float32) * (1.0 / 9007199254740992.0)
    uniform = tl.minimum(tl.maximum(uniform, 8.673617379884035e-19), 0.99999994)
    # -log(1 - u). The GPU's logarithm is too coarse near 1: there 2 atanh(x) with x = u / (2 - u), at most 1/3.
    x = uniform / (2.0 - uniform)
    square = x * x
    series = 1.0 / 15.0
    for power in tl.static_range(13, 0, -2):
        series = series * square + 1.0 / power
    return tl.where(uniform <= 0.5, 2.0 * x * series, -tl.log(1.0 - uniform))


@triton.jit
def _race_blocks(
    logits, temperatures, starts, largest, ratios, winners, vocab_size, logits_row_stride, num_parts,
    BLOCKS: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """One program: the race between ``BLOCKS`` blocks of one row."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    block = part * BLOCKS + tl.arange(0, BLOCKS)
    token_id = block[:, None] * IDS + tl.arange(0, IDS)[None, :]
    exists = token_id < vocab_size
    logit = tl.load(logits + row.to(tl.int64) * logits_row_stride + token_id, mask=exists, other=float("-inf"))
    scaled = logit * (1.0 / tl.load(temperatures + row))
    top = tl.max(tl.max(scaled, 1), 0)
    # Barred ids have no probability; where all of them are barred, what they are compared with may be anything finite.
    mass = tl.sum(tl.exp(scaled - tl.where(top == float("-inf"), 0.0, top)), 1)
    start = tl.load(starts + row).to(tl.uint64, bitcast=True)
    ratio = mass / _exponential(_random_bits(start, -1 - block.to(tl.int64)))
    ratio, winner = tl.max(tl.where(block * IDS < vocab_size, ratio, -1.0), 0, return_indices=True)
    out = row * num_parts + part
    tl.store(largest + out, top)
    tl.store(ratios + out, ratio)
    tl.store(winners + out, part * BLOCKS + winner)


@triton.jit
def _race_ids(
    logits, temperatures, starts, largest, ratios, winners, token_ids, vocab_size, logits_row_stride, num_parts,
    PARTS: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """One program: one row, first between the winning blocks, then between the ids of the block that wins."""
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    exists = part < num_parts
    top = tl.load(largest + row * num_parts + part, mask=exists, other=float("-inf"))
    ratio = tl.load(ratios + row * num_parts + part, mask=exists, other=-1.0)
    overall = tl.max(top, 0)
    ratio = ratio * tl.exp(top - tl.where(overall == float("-inf"), 0.0, overall))
    _, first = tl.max(tl.where(exists, ratio, -1.0), 0, return_indices=True)

    token_id = tl.load(winners + row * num_parts + first) * IDS + tl.arange(0, IDS)
    exists = token_id < vocab_size
    logit = tl.load(logits + row.to(tl.int64) * logits_row_stride + token_id, mask=exists, other=float("-inf"))
    scaled = logit * (1.0 / tl.load(temperatures + row))
    top = tl.max(scaled, 0)
    start = tl.load(starts + row).to(tl.uint64, bitcast=True)
    weight = tl.exp(scaled - tl.where(top == float("-inf"), 0.0, top))
    ratio = weight / _exponential(_random_bits(start, 1 + token_id.to(tl.int64)))
    _, winner = tl.max(tl.where(exists, ratio, -1.0), 0, return_indices=True)
    tl.store(token_ids + row, (tl.min(token_id, 0) + winner).to(tl.int64))


def draw_tokens(logits: torch.Tensor, temperatures: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Draw one token for each row, with probabilities ``softmax(logits / temperature)``.

    Args:
        logits: float32 ``[rows, vocabulary]``, any row stride; minus infinity: the token cannot win.
        temperatures: float32 ``[rows]``, above 0.
        starts: int64 ``[rows]``: where each row's stream of random numbers begins. Rows with equal starts and logits draw
            the same, whatever is beside them.

    Returns:
        Token ids, int64 ``[rows]``.

    Raises:
        ValueError: a shape, type, device or stride that the kernel cannot take.
    """
    device = logits.device
    check_device("logits", device)
    check_tensor("logits", logits, (None, None), (torch.float32,), device)
    num_rows, vocab_size = logits.shape
    check_tensor("temperatures", temperatures, (num_rows,), (torch.float32,), device)
    check_tensor("starts", starts, (num_rows,), (torch.int64,), device)
    check_at_most("logits", "tokens", vocab_size, BLOCK_IDS * _BLOCKS * MAX_PROGRAMS_ACROSS)
    if vocab_size == 0:
        raise ValueError(f"logits: expected at least one token, got {list(logits.shape)}")
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return token_ids
    num_parts = triton.cdiv(vocab_size, BLOCK_IDS * _BLOCKS)
    largest, ratios = torch.empty(2, num_rows, num_parts, dtype=torch.float32, device=device).unbind()
    winners = torch.empty(num_rows, num_parts, dtype=torch.int32, device=device)
    given = logits, temperatures, starts, largest, ratios, winners
    shape = vocab_size, logits.stride(0), num_parts
    _race_blocks[(num_rows, num_parts)](*given, *shape, BLOCKS=_BLOCKS, IDS=BLOCK_IDS, num_warps=8)
    _race_ids[(num_rows,)](*given, token_ids, *shape, PARTS=triton.next_power_of_2(num_parts), IDS=BLOCK_IDS)
    return token_ids
