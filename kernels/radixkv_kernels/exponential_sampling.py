"""One token per row, drawn from a whole vocabulary in one reading of its logits.

Exponential sampling: each candidate gets an exponential variate, and the largest ratio of probability to variate is drawn (an
"exponential race", equivalent to Gumbel-max sampling). It is done twice: between blocks of 256 neighbouring token ids, by the
probability that a block has in all, and between the ids of the block that was drawn. So a vocabulary of 128,000 takes 756
variates rather than as many as ids::

    logits of a row   | 4,096 = 16 blocks | 4,096 | ...   per program: its largest logit, the block drawn, that block's ratio
                                 \\         /
                        one program per row: the block among those, ratios brought to one largest logit; then its ids

Variates are a pure function of the row's RNG state and the id, by SplitMix64 (Steele, Lea, Flood 2014) counted up by ids and
down by blocks.

Bytes moved: each logit is read once, ``4 * rows * vocabulary``; the floor on a GPU of B bytes/s is that over B (256 rows of
128,000 tokens: 131 MB, 30 us at 4.3 TB/s).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv_kernels.checks import MAX_PROGRAMS_ACROSS, check_at_most, check_device, check_tensor
from radixkv_kernels.target import COMPILE_OPTIONS

BLOCK_IDS = 256
_BLOCKS = 16
PART_IDS = _BLOCKS * BLOCK_IDS
"""What one program reads of a row."""


@triton.jit
def random_bits(state, count):
    """64 random bits for each of the counts."""
    x = state + count.to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def exponential(bits):
    """Variates of mean 1 from 64 random bits, with full relative precision where they are small: those decide the draw."""
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
def load_scaled(logits, temperatures, row, token_id, exists, row_stride):
    """A row's logits divided by its temperature; minus infinity for ids that do not exist, plus infinity and NaN."""
    logit = tl.load(logits + row.to(tl.int64) * row_stride + token_id, mask=exists, other=float("-inf"))
    scaled = logit * (1.0 / tl.load(temperatures + row))
    # A NaN compares as neither more nor less than anything, so that an id that does not exist could be drawn.
    return tl.where(scaled < float("inf"), scaled, float("-inf"))


@triton.jit
def _draw_block(
    logits, temperatures, rng_states, largest, ratios, drawn_blocks, vocab_size, logits_row_stride, num_parts,
    BLOCKS: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """One program: one of ``BLOCKS`` blocks of one row."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    block = part * BLOCKS + tl.arange(0, BLOCKS)
    token_id = block[:, None] * IDS + tl.arange(0, IDS)[None, :]
    scaled = load_scaled(logits, temperatures, row, token_id, token_id < vocab_size, logits_row_stride)
    top = tl.max(tl.max(scaled, 1), 0)
    # Barred ids have no probability; where all of them are barred, what they are compared with may be anything finite.
    mass = tl.sum(tl.exp(scaled - tl.where(top == float("-inf"), 0.0, top)), 1)
    state = tl.load(rng_states + row).to(tl.uint64, bitcast=True)
    ratio = mass / exponential(random_bits(state, -1 - block.to(tl.int64)))
    ratio, drawn = tl.max(tl.where(block * IDS < vocab_size, ratio, -1.0), 0, return_indices=True)
    out = row * num_parts + part
    tl.store(largest + out, top)
    tl.store(ratios + out, ratio)
    tl.store(drawn_blocks + out, part * BLOCKS + drawn)


@triton.jit
def _draw_id(
    logits, temperatures, rng_states, largest, ratios, drawn_blocks, token_ids, vocab_size, logits_row_stride, num_parts,
    PARTS: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """One program: for one row, one of the blocks that were drawn, then one of that block's ids."""
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    exists = part < num_parts
    top = tl.load(largest + row * num_parts + part, mask=exists, other=float("-inf"))
    ratio = tl.load(ratios + row * num_parts + part, mask=exists, other=-1.0)
    overall = tl.max(top, 0)
    ratio = ratio * tl.exp(top - tl.where(overall == float("-inf"), 0.0, overall))
    _, first = tl.max(tl.where(exists, ratio, -1.0), 0, return_indices=True)

    token_id = tl.load(drawn_blocks + row * num_parts + first) * IDS + tl.arange(0, IDS)
    exists = token_id < vocab_size
    scaled = load_scaled(logits, temperatures, row, token_id, exists, logits_row_stride)
    top = tl.max(scaled, 0)
    state = tl.load(rng_states + row).to(tl.uint64, bitcast=True)
    weight = tl.exp(scaled - tl.where(top == float("-inf"), 0.0, top))
    ratio = weight / exponential(random_bits(state, 1 + token_id.to(tl.int64)))
    _, drawn = tl.max(tl.where(exists, ratio, -1.0), 0, return_indices=True)
    tl.store(token_ids + row, (tl.min(token_id, 0) + drawn).to(tl.int64))


def draw_tokens(logits: torch.Tensor, temperatures: torch.Tensor, rng_states: torch.Tensor) -> torch.Tensor:
    """Draw one token for each row, with probabilities ``softmax(logits / temperature)``.

    Args:
        logits: float32 ``[rows, vocabulary]``, any row stride. A token whose logit is not finite is drawn only if no logit
            of the row is finite.
        temperatures: float32 ``[rows]``, above 0.
        rng_states: int64 ``[rows]``: where each row's random numbers begin. Rows with equal states and logits draw the same
            token, whatever rows are beside them.

    Returns:
        Token ids, int64 ``[rows]``.

    Raises:
        ValueError: a shape, type, device or stride that the kernel cannot take.
    """
    check_draw(logits, temperatures, rng_states)
    device = logits.device
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return token_ids
    num_parts = triton.cdiv(vocab_size, PART_IDS)
    # Apart, so that each begins on 16 bytes whatever the number of rows.
    largest, ratios = (torch.empty(num_rows, num_parts, dtype=torch.float32, device=device) for _ in range(2))
    drawn_blocks = torch.empty(num_rows, num_parts, dtype=torch.int32, device=device)
    given = logits, temperatures, rng_states, largest, ratios, drawn_blocks
    shape = vocab_size, logits.stride(0), num_parts
    _draw_block[(num_rows, num_parts)](*given, *shape, BLOCKS=_BLOCKS, IDS=BLOCK_IDS, num_warps=8, **COMPILE_OPTIONS)
    parts = triton.next_power_of_2(num_parts)
    _draw_id[(num_rows,)](*given, token_ids, *shape, PARTS=parts, IDS=BLOCK_IDS, **COMPILE_OPTIONS)
    return token_ids


def check_draw(logits: torch.Tensor, temperatures: torch.Tensor, rng_states: torch.Tensor) -> None:
    """Refuse arguments of `draw_tokens` that no kernel that draws takes.

    Raises:
        ValueError: names the tensor, what is expected and what was given.
    """
    device = logits.device
    check_device("logits", device)
    check_tensor("logits", logits, (None, None), (torch.float32,), device)
    num_rows, vocab_size = logits.shape
    check_tensor("temperatures", temperatures, (num_rows,), (torch.float32,), device)
    check_tensor("rng_states", rng_states, (num_rows,), (torch.int64,), device)
    check_at_most("logits", "tokens", vocab_size, PART_IDS * MAX_PROGRAMS_ACROSS)
    if vocab_size == 0:
        raise ValueError(f"logits: expected at least one token, got {list(logits.shape)}")
