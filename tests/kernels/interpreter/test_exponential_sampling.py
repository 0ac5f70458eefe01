"""The kernel that draws from a whole vocabulary against the sampler's draw in torch."""

from __future__ import annotations

import itertools

import pytest
import torch

from radixkv.sampling.exponential import draw
from radixkv.sampling.variates import SamplingRow, rng_states
from radixkv.sampling_params import SamplingParams
from radixkv_kernels import draw_tokens

CPU = torch.device("cpu")


# One program, one that is full, two, and more, whose number is no power of 2: also the last one of these is drawn from.
@pytest.mark.parametrize(
    ("vocab_size", "spread"),
    [*itertools.product((1, 7, 4096, 4097), (0.0, 1.0, 8.0)), (20000, 1.0)],
)
def test_the_kernel_draws_what_torch_draws(vocab_size: int, spread: float) -> None:
    logits = torch.randn(16, vocab_size + 3, generator=torch.Generator().manual_seed(vocab_size)) * spread
    logits[:, vocab_size:] = 1e4  # of no token
    logits = logits[:, :vocab_size]
    rows = [SamplingRow(SamplingParams(temperature=(0.3, 1.0, 2.0)[i % 3]), 2**40 + i, i % 2, i) for i in range(16)]
    temperatures = torch.tensor([row.params.temperature for row in rows])
    token_ids = draw_tokens(logits, temperatures, rng_states(rows, CPU))
    assert token_ids.tolist() == draw(logits, rows).tolist()


def test_barred_tokens_are_never_drawn() -> None:
    logits = torch.full((16, 9000), float("-inf"))
    logits[:, [5, 4100]] = 0.0
    rows = [SamplingRow(SamplingParams(), seed, 0, 0) for seed in range(16)]
    token_ids = draw_tokens(logits, torch.ones(16), rng_states(rows, CPU))
    assert set(token_ids.tolist()) == {5, 4100}


def test_what_is_no_number_is_never_drawn() -> None:
    """And where no logit is a number, some token of the vocabulary is drawn all the same."""
    logits = torch.full((16, 9001), float("nan"))
    logits[:, 3] = float("inf")
    rows = [SamplingRow(SamplingParams(), seed, 0, 0) for seed in range(16)]
    assert draw_tokens(logits, torch.ones(16), rng_states(rows, CPU)).max() < 9001
    logits[:, [5, 4100]] = 0.0
    token_ids = draw_tokens(logits, torch.ones(16), rng_states(rows, CPU))
    assert set(token_ids.tolist()) == {5, 4100}
