"""Exponential sampling: one token per row of logits, drawn on the logits' device with random numbers that belong to requests.

Each candidate gets an exponential variate, and the largest ratio of probability to variate is drawn (an "exponential race",
equivalent to Gumbel-max sampling). The variates are a pure function of the request's seed, the sample, the token's index in
the answer and the candidate's token id. They come from SplitMix64 (Steele, Lea, Flood 2014), counted from an RNG state that
the first three determine, in 64-bit integers throughout, so that every device draws the same token.

Where top_k, top_p or min_p leave few candidates, these are drawn from directly. Otherwise a block of 256 neighbouring token
ids is drawn first, by the total probability of each block, and then a token id within it: a vocabulary of 49,152 takes 448
variates and little more time than its softmax. On a GPU, `radixkv_kernels.draw_tokens` does so in one kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from radixkv.memory.upload import to_device
from radixkv.sampling_params import SamplingParams

# How many of the likeliest tokens are considered first for top_p: sorting a whole vocabulary costs far more.
FIRST_NUM_CANDIDATES = 1024

# The same as in `radixkv_kernels`, so that a GPU draws the same tokens.
_BLOCK_IDS = 256

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the draw of one row of a batch depends on, besides its logits.

    Attributes:
        seed: the request's.
        sample_index: which of the request's samples.
        token_index: index of the drawn token in the sample's output.
    """

    params: SamplingParams
    seed: int
    sample_index: int
    token_index: int

    @property
    def truncates(self) -> bool:
        """Whether top_k, top_p or min_p remove candidates."""
        params = self.params
        return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def rng_states(rows: Sequence[SamplingRow], device: torch.device) -> torch.Tensor:
    """The state from which each row's variates are counted, int64 ``[rows]``."""
    keys = [[row.seed & (2**63 - 1), row.sample_index, row.token_index] for row in rows]
    seed, sample, index = to_device(torch.tensor(keys, dtype=torch.int64), device).unbind(1)
    return _mix(_mix(_mix(seed + _GOLDEN) + (sample + 1) * _GOLDEN) + (index + 1) * _GOLDEN)


def exponential_variates(states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Variates of mean 1, float32 ``[rows, tokens]``; never 0 or infinite.

    Args:
        states: RNG state per row, see `rng_states`.
        token_ids: int64 ``[rows, tokens]`` or ``[1, tokens]``; block b of a vocabulary counts as ``-2 - b``.
    """
    bits = _mix(states.unsqueeze(1) + (token_ids + 1) * _GOLDEN)
    # Rounded to float32 last: small variates decide the draw, and keep their relative precision this way.
    uniform = _shift(bits, 11).double().mul_(2**-53).float()
    return uniform.clamp_(2**-60, 1 - 2**-24).neg_().log1p_().neg_()


def draw(
    logits: torch.Tensor, rows: Sequence[SamplingRow], num_candidates: int = FIRST_NUM_CANDIDATES
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row of float32 ``logits`` ``[rows, vocabulary]``, without synchronizing with the device.

    Logits are divided by the temperature, then truncated by min_p, top_k and top_p, in that order.

    Returns:
        Token ids, int64 ``[rows]``; and which of them are final, bool ``[rows]``: a row that is not must be drawn again with
        more than its ``num_candidates`` likeliest tokens.
    """
    device = logits.device
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=device)
    final = torch.ones(len(rows), dtype=torch.bool, device=device)
    truncated = [i for i, row in enumerate(rows) if row.truncates]
    whole = [i for i, row in enumerate(rows) if not row.truncates]
    if whole:
        indices = to_device(torch.tensor(whole), device)
        token_ids[indices] = _draw_from_vocabulary(logits[indices] if truncated else logits, [rows[i] for i in whole])
    if truncated:
        indices = to_device(torch.tensor(truncated), device)
        token_ids[indices], final[indices] = _draw_from_likeliest(
            logits[indices] if whole else logits, [rows[i] for i in truncated], num_candidates
        )
    return token_ids, final


def draw_in_every_way(logits: torch.Tensor) -> None:
    """Draw one token per row of ``logits`` with and without truncation: compiles every kernel, and needs the most memory.

    Truncation takes several times the memory of the logits, drawing from the whole vocabulary none.
    """
    for params in (SamplingParams(), SamplingParams(top_p=0.9)):
        draw(logits, [SamplingRow(params, seed=0, sample_index=0, token_index=0)] * len(logits))


def _temperatures(rows: Sequence[SamplingRow], device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor([row.params.temperature for row in rows]), device)


def _draw_from_vocabulary(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    device = logits.device
    temperatures, states = _temperatures(rows, device), rng_states(rows, device)
    if device.type == "cuda":
        # Imported only here: without a GPU, Triton need not be installed.
        from radixkv_kernels import draw_tokens

        with torch.cuda.device(device):
            return draw_tokens(logits, temperatures, states)
    # Row by row: one row fits into a processor's cache, a batch does not.
    masses = torch.stack(
        [_block_masses(row / temperature) for row, temperature in zip(logits, temperatures, strict=True)]
    )
    blocks = torch.arange(masses.shape[1]).unsqueeze(0)
    block = (masses / exponential_variates(states, -2 - blocks)).argmax(-1, keepdim=True)
    ids = block * _BLOCK_IDS + torch.arange(_BLOCK_IDS)
    beyond = ids >= logits.shape[1]
    scaled = logits.gather(1, ids.masked_fill(beyond, 0)) / temperatures.unsqueeze(1)
    probs = torch.softmax(scaled.masked_fill_(beyond, float("-inf")), -1)
    drawn = (probs / exponential_variates(states, ids)).argmax(-1, keepdim=True)
    return ids.gather(1, drawn).squeeze(1)


def _block_masses(scaled: torch.Tensor) -> torch.Tensor:
    """The total probability of each block of one row."""
    probs = torch.softmax(scaled, -1)
    missing = -len(probs) % _BLOCK_IDS
    return (torch.nn.functional.pad(probs, (0, missing)) if missing else probs).view(-1, _BLOCK_IDS).sum(-1)


def _draw_from_likeliest(
    logits: torch.Tensor, rows: Sequence[SamplingRow], num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    device, vocab_size = logits.device, logits.shape[1]
    limits = [row.params.top_k if 0 < row.params.top_k < vocab_size else vocab_size for row in rows]
    numbers = [[limit, row.params.top_p, row.params.min_p] for limit, row in zip(limits, rows, strict=True)]
    top_k, top_p, min_p = to_device(torch.tensor(numbers), device).unsqueeze(2).unbind(1)
    count = min(num_candidates, vocab_size, max(limits))
    # Probabilities stay those of the whole vocabulary until truncation is complete.
    probs, ids = _likeliest(logits, _temperatures(rows, device), count)
    rank = torch.arange(count, device=device).unsqueeze(0)
    keep = (probs >= min_p * probs[:, :1]) & (rank < top_k)
    kept = probs * keep
    total = kept.sum(-1, keepdim=True)
    saw_all = (top_k <= count) | ~keep[:, -1:] | (count == vocab_size)
    # top_p counts within what min_p and top_k have left. Where they leave more than the candidates, that is everything if
    # they removed nothing, and unknown otherwise.
    untruncated = (min_p == 0.0) & (top_k == vocab_size)
    mass = top_p * torch.where(saw_all, total, 1.0)
    final = saw_all | (untruncated & (total >= mass))
    # A token stays while the likelier ones together are below the mass; so the first always does.
    kept = kept * ((kept.cumsum(-1) - kept) < mass)
    kept[:, 0] = probs[:, 0]
    drawn = (kept / exponential_variates(rng_states(rows, device), ids)).argmax(-1, keepdim=True)
    return ids.gather(1, drawn).squeeze(1), final.squeeze(1)


def _likeliest(logits: torch.Tensor, temperatures: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest probabilities of each row in descending order, and their token ids."""
    if logits.device.type != "cpu":
        scaled = logits / temperatures.unsqueeze(1)
        values, ids = torch.topk(scaled, count)
        return torch.exp(values - torch.logsumexp(scaled, -1, keepdim=True)), ids
    # Row by row, within a processor's cache, and by numpy, which selects with the widest instructions: 1,024 of 49,152 take
    # it 0.07 ms, and torch 0.4.
    found = []
    for row, temperature in zip(logits, temperatures, strict=True):
        scaled = row / temperature
        host = scaled.numpy()
        largest = np.argpartition(host, -count)[-count:]
        ids = torch.from_numpy(largest[np.argsort(-host[largest])])
        found.append((torch.softmax(scaled, -1)[ids], ids))
    probs, ids = (torch.stack(column) for column in zip(*found, strict=True))
    return probs, ids


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)).mul_(_MIX_1)
    x = x.bitwise_xor_(_shift(x, 27)).mul_(_MIX_2)
    return x.bitwise_xor_(_shift(x, 31))


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right: torch has no arithmetic on unsigned 64-bit integers."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
