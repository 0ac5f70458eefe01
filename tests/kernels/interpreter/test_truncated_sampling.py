"""The kernel that draws from what truncation leaves against the draw on a CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.sampling.exponential import draw
from radixkv.sampling.variates import SamplingRow, rng_states
from radixkv.sampling_params import SamplingParams
from radixkv_kernels import draw_truncated, truncated_sampling

CPU = torch.device("cpu")

KINDS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 1.0, 2.0]),
        "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.01]),
        "top_k": st.sampled_from([0, 0, 1, 5, 60, 64, 65, 150, 5000]),
        "min_p": st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    }
)


def drawn(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    vocab_size, params = logits.shape[1], [row.params for row in rows]
    token_ids = draw_truncated(
        logits,
        torch.tensor([p.temperature for p in params]),
        rng_states(rows, CPU),
        min_p=torch.tensor([p.min_p for p in params]),
        top_k=torch.tensor([p.top_k or vocab_size for p in params], dtype=torch.int32).clamp(max=vocab_size),
        top_p=torch.tensor([p.top_p for p in params]),
    )
    return token_ids.tolist()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    kinds=st.lists(KINDS, min_size=1, max_size=4),
    # Fewer tokens than are read at a time, as many, more; the same of blocks and of candidates.
    vocab_size=st.sampled_from([1, 2, 7, 64, 65, 1024, 1025, 2048, 2049, 4096, 4097, 8192, 9001]),
    # Up to where most weights are 0, and some have no full precision.
    spread=st.sampled_from([0.0, 0.3, 3.0, 10.0, 50.0]),
    spacing=st.sampled_from([None, None, 0.25]),
    barred=st.booleans(),
)
def test_the_kernel_draws_what_a_cpu_draws(
    seed: int, kinds: list[dict[str, float]], vocab_size: int, spread: float, spacing: float | None, barred: bool
) -> None:
    """With ties, which logits of a spacing have; every third token barred, so that less is left than top_k asks for."""
    logits = torch.randn(len(kinds), vocab_size + 3, generator=torch.Generator().manual_seed(seed)) * spread
    logits[:, vocab_size:] = 1e4  # of no token
    logits = logits[:, :vocab_size]
    if spacing is not None:
        logits = (logits / spacing).round() * spacing
    if barred and vocab_size > 1:
        logits[:, ::3] = float("-inf")
    rows = [SamplingRow(SamplingParams(**kind), seed + i, i % 2, i) for i, kind in enumerate(kinds)]
    # A row that truncates nothing is drawn from the whole vocabulary in another way.
    truncated = [i for i, row in enumerate(rows) if row.truncates]
    expected = draw(logits, rows).tolist()
    found = drawn(logits, rows)
    assert [found[i] for i in truncated] == [expected[i] for i in truncated]


@pytest.mark.parametrize("params", [SamplingParams(top_p=0.9), SamplingParams(top_k=3), SamplingParams(min_p=0.1)])
def test_what_is_no_number_is_never_drawn(params: SamplingParams) -> None:
    """And where no logit is a number, some token of the vocabulary is drawn all the same."""
    logits = torch.full((8, 4099), float("nan"))
    logits[:, 3] = float("inf")
    rows = [SamplingRow(params, seed, 0, 0) for seed in range(8)]
    assert all(0 <= token_id < 4099 for token_id in drawn(logits, rows))
    logits[:, [5, 4097]] = 0.0
    assert set(drawn(logits, rows)) == {5, 4097}


def test_the_smallest_top_p_leaves_the_likeliest() -> None:
    logits = torch.zeros(4, 300)
    logits[:, 7] = 1e-3
    assert drawn(logits, [SamplingRow(SamplingParams(top_p=1e-46), seed, 0, 0) for seed in range(4)]) == [7] * 4


def test_a_vocabulary_with_more_blocks_than_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes then have the largest logit of several blocks; top_k up to their number, and beyond."""
    monkeypatch.setattr(truncated_sampling, "_MAX_LANES", 64)
    kinds = [{"top_k": 3}, {"top_k": 64}, {"top_k": 65}, {"top_k": 200, "top_p": 0.5}, {"top_p": 0.9}, {"min_p": 0.1}]
    logits = torch.randn(len(kinds), 9001, generator=torch.Generator().manual_seed(0)) * 3.0
    rows = [SamplingRow(SamplingParams(**kind), i, 0, i) for i, kind in enumerate(kinds)]
    assert drawn(logits, rows) == draw(logits, rows).tolist()


def test_a_row_is_drawn_alike_whatever_is_beside_it() -> None:
    kinds = [{"top_k": 20, "top_p": 0.8}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 5000}]
    logits = torch.randn(len(kinds), 9001, generator=torch.Generator().manual_seed(1))
    rows = [SamplingRow(SamplingParams(**kind), i, 0, i) for i, kind in enumerate(kinds)]
    together = drawn(logits, rows)
    assert together == [drawn(logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(kinds))]
