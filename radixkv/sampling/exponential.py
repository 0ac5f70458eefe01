"""Draws tokens for many rows at once, on the logits' device, by exponential races.

In a race everybody has an exponential variate, and the largest ratio of probability to variate wins; it is equivalent to
Gumbel-max sampling. Variates are a pure function of (the request's seed, the sample, the number of the token, who races).
They come from SplitMix64 (Steele, Lea, Flood 2014), counted from a start that the first three decide, all in 64-bit integers,
so that every device draws the same.

Where top_k, top_p or min_p leave few token ids, these race with one another. Otherwise blocks of 256 neighbouring ids do, by
the probability that each has in all, and then the ids of the block that has won: a vocabulary of 49,152 takes 448 variates,
and little more than its softmax. On a GPU `radixkv_kernels.race` does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from radixkv.memory.upload import to_device
from radixkv.sampling_params import SamplingParams

# How many of the likeliest tokens are looked at first for top_p: sorting a whole vocabulary costs far more.
FIRST_LOOK = 1024

# As many as `radixkv_kernels.race` has.
_BLOCK_IDS = 256

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


@dataclass(frozen=True, slots=True)
class Racer:
    """One row's draw: its parameters, and what its random numbers depend on.

    Attributes:
        seed: the request's.
        sample_index: which of the request's answers.
        token_number: which token of the answer.
    """

    params: SamplingParams
    seed: int
    sample_index: int
    token_number: int

    @property
    def is_cut(self) -> bool:
        """Whether top_k, top_p or min_p leave some tokens out."""
        params = self.params
        return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def starts(racers: Sequence[Racer], device: torch.device) -> torch.Tensor:
    """Where each row's stream of random numbers begins, int64 ``[rows]``."""
    keys = [[racer.seed & (2**63 - 1), racer.sample_index, racer.token_number] for racer in racers]
    seed, sample, number = to_device(torch.tensor(keys, dtype=torch.int64), device).unbind(1)
    return _mix(_mix(_mix(seed + _GOLDEN) + (sample + 1) * _GOLDEN) + (number + 1) * _GOLDEN)


def exponentials(start: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Variates of mean 1, float32 ``[rows, tokens]``; never 0 or infinite.

    Args:
        start: of each row, see `starts`.
        token_ids: int64 ``[rows, tokens]`` or ``[1, tokens]``; block b of a vocabulary counts as ``-2 - b``.
    """
    bits = _mix(start.unsqueeze(1) + (token_ids + 1) * _GOLDEN)
    # Rounded only at the end: small variates decide races, and keep their relative precision so.
    uniform = _shift(bits, 11).double().mul_(2**-53).float()
    return uniform.clamp_(2**-60, 1 - 2**-24).neg_().log1p_().neg_()


def draw(logits: torch.Tensor, racers: Sequence[Racer], look: int = FIRST_LOOK) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row of float32 ``logits`` ``[rows, vocabulary]``, without waiting for the device.

    Logits are divided by the temperature, then cut by min_p, top_k and top_p, in that order.

    Returns:
        Token ids, int64 ``[rows]``; and which of them are settled, bool ``[rows]``: a row that is not needs more than the
        ``look`` likeliest tokens to be looked at.
    """
    device = logits.device
    token_ids = torch.empty(len(racers), dtype=torch.int64, device=device)
    settled = torch.ones(len(racers), dtype=torch.bool, device=device)
    cut = [i for i, racer in enumerate(racers) if racer.is_cut]
    whole = [i for i, racer in enumerate(racers) if not racer.is_cut]
    if whole:
        rows = to_device(torch.tensor(whole), device)
        token_ids[rows] = _draw_from_all(logits[rows] if cut else logits, [racers[i] for i in whole])
    if cut:
        rows = to_device(torch.tensor(cut), device)
        token_ids[rows], settled[rows] = _draw_from_likeliest(
            logits[rows] if whole else logits, [racers[i] for i in cut], look
        )
    return token_ids, settled


def draw_in_every_way(logits: torch.Tensor) -> None:
    """Draw one token a row of ``logits`` in each way there is: what a step's draws take at most, all kernels compiled.

    Cutting takes several times the memory of the logits. Drawing from all of them takes none.
    """
    for params in (SamplingParams(), SamplingParams(top_p=0.9)):
        draw(logits, [Racer(params, seed=0, sample_index=0, token_number=0)] * len(logits))


def _temperatures(racers: Sequence[Racer], device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor([racer.params.temperature for racer in racers]), device)


def _draw_from_all(logits: torch.Tensor, racers: Sequence[Racer]) -> torch.Tensor:
    device = logits.device
    temperatures, start = _temperatures(racers, device), starts(racers, device)
    if device.type == "cuda":
        # Only here: without a GPU, Triton need not be installed.
        from radixkv_kernels import draw_tokens

        with torch.cuda.device(device):
            return draw_tokens(logits, temperatures, start)
    # Row by row, for a processor's cache holds one row and not many.
    masses = torch.stack(
        [_block_masses(row / temperature) for row, temperature in zip(logits, temperatures, strict=True)]
    )
    blocks = torch.arange(masses.shape[1]).unsqueeze(0)
    block = (masses / exponentials(start, -2 - blocks)).argmax(-1, keepdim=True)
    ids = block * _BLOCK_IDS + torch.arange(_BLOCK_IDS)
    beyond = ids >= logits.shape[1]
    scaled = logits.gather(1, ids.masked_fill(beyond, 0)) / temperatures.unsqueeze(1)
    probs = torch.softmax(scaled.masked_fill_(beyond, float("-inf")), -1)
    winner = (probs / exponentials(start, ids)).argmax(-1, keepdim=True)
    return ids.gather(1, winner).squeeze(1)


def _block_masses(scaled: torch.Tensor) -> torch.Tensor:
    """The probability of each block of one row."""
    probs = torch.softmax(scaled, -1)
    missing = -len(probs) % _BLOCK_IDS
    return (torch.nn.functional.pad(probs, (0, missing)) if missing else probs).view(-1, _BLOCK_IDS).sum(-1)


def _draw_from_likeliest(logits: torch.Tensor, racers: Sequence[Racer], look: int) -> tuple[torch.Tensor, torch.Tensor]:
    device, vocab_size = logits.device, logits.shape[1]
    limits = [racer.params.top_k if 0 < racer.params.top_k < vocab_size else vocab_size for racer in racers]
    numbers = [[limit, racer.params.top_p, racer.params.min_p] for limit, racer in zip(limits, racers, strict=True)]
    top_k, top_p, min_p = to_device(torch.tensor(numbers), device).unsqueeze(2).unbind(1)
    count = min(look, vocab_size, max(limits))
    # Probabilities stay those of the whole vocabulary until all are cut.
    probs, ids = _likeliest(logits, _temperatures(racers, device), count)
    place = torch.arange(count, device=device).unsqueeze(0)
    keep = (probs >= min_p * probs[:, :1]) & (place < top_k)
    kept = probs * keep
    total = kept.sum(-1, keepdim=True)
    saw_all = (top_k <= count) | ~keep[:, -1:] | (count == vocab_size)
    # top_p counts within what min_p and top_k have left. Where they leave more than was looked at, that is all if they
    # cut nothing, and not known otherwise.
    uncut = (min_p == 0.0) & (top_k == vocab_size)
    mass = top_p * torch.where(saw_all, total, 1.0)
    settled = saw_all | (uncut & (total >= mass))
    # A token stays while the likelier ones together are below the mass; so the first always does.
    kept = kept * ((kept.cumsum(-1) - kept) < mass)
    kept[:, 0] = probs[:, 0]
    winner = (kept / exponentials(starts(racers, device), ids)).argmax(-1, keepdim=True)
    return ids.gather(1, winner).squeeze(1), settled.squeeze(1)


def _likeliest(logits: torch.Tensor, temperatures: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest probabilities of each row, falling, and their ids."""
    if logits.device.type != "cpu":
        scaled = logits / temperatures.unsqueeze(1)
        values, ids = torch.topk(scaled, count)
        return torch.exp(values - torch.logsumexp(scaled, -1, keepdim=True)), ids
    # Row by row within a processor's cache; and numpy selects with its widest instructions: 1,024 of 49,152 take it 0.07 ms,
    # and torch 0.4.
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
    """To the right, zeros coming in: torch has no unsigned 64-bit integers that it computes with."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
