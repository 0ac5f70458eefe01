"""Native log-probabilities against those in float64, and the order of the likeliest tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cpu_variants import each_variant, use

from radixkv_cpu import library, token_logprobs

pytestmark = pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")


@each_variant
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 255, 256, 300, 5000, 49_152])
@pytest.mark.parametrize("spacing", [None, 2.0], ids=["all differ", "many alike"])
@pytest.mark.parametrize("count", [0, 1, 5, 20, 1000])
def test_they_are_those_of_a_reference(variant: str, vocab_size: int, spacing: float | None, count: int) -> None:
    """Of tokens as likely as one another, those of the lowest ids come first, and they share a rank."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size, generator=generator) * 4
    if spacing is not None:
        logits = (logits / spacing).round() * spacing
    logits[0] -= 60.0
    logits[1, 1:] = float("-inf")  # all but one masked
    token_ids = torch.randint(vocab_size, (5,), generator=generator)
    token_ids[1] = 0
    count = min(count, vocab_size)
    with use(variant):
        found = token_logprobs(logits, token_ids, count)
    totals = logits.double().logsumexp(-1)
    torch.testing.assert_close(found.totals.double(), totals, rtol=3e-7, atol=2e-6)
    own = logits.gather(1, token_ids.unsqueeze(1))
    assert found.ranks.tolist() == ((logits > own).sum(-1) + 1).tolist()
    ids = (-logits).argsort(dim=-1, stable=True)[:, :count]
    assert torch.equal(found.top_ids, ids)
    assert torch.equal(found.top_logits, logits.gather(1, ids))


@each_variant
@pytest.mark.parametrize(("position", "value"), [(0, "nan"), (700, "nan"), (999, "nan"), (3, "inf")])
def test_a_row_that_is_no_numbers_disturbs_no_other(variant: str, position: int, value: str) -> None:
    logits, token_ids = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)), torch.tensor([1, position, 2])
    with use(variant):
        expected = token_logprobs(logits, token_ids, 30)
        logits[1, position] = float(value)
        found = token_logprobs(logits, token_ids, 30)
    assert all(torch.equal(mine[[0, 2]], its[[0, 2]]) for mine, its in zip(found, expected, strict=True))
    assert not found.totals[1].isfinite()
    assert all(0 <= token < 1000 for token in found.top_ids[1].tolist())


@each_variant
def test_equally_likely_tokens_share_a_rank_where_denormal_numbers_count_as_zero(variant: str) -> None:
    """The next number above a logit of 0 did, so every other 0 was above it."""
    logits = torch.zeros(1, 100)
    logits[0, 3] = 1.0
    torch.set_flush_denormal(True)
    try:
        with use(variant):
            assert token_logprobs(logits, torch.tensor([70]), 0).ranks.tolist() == [2]
    finally:
        torch.set_flush_denormal(False)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "logits": ({"logits": torch.zeros(6)}, r"logits: expected shape \[any, any\], got \[6\]"),
    "type": ({"logits": torch.zeros(2, 6).bfloat16()}, "logits: expected float32, got bfloat16"),
    "tokens": ({"token_ids": torch.zeros(3).long()}, r"token_ids: expected shape \[2\], got \[3\]"),
    "beyond": ({"token_ids": torch.tensor([5, 6])}, r"token_ids: expected 0 to 5, got \[5, 6\]"),
    "below": ({"token_ids": torch.tensor([-1, 0])}, r"token_ids: expected 0 to 5, got \[-1, 0\]"),
    "count": ({"count": 7}, "count: expected 0 to 6, as many as the vocabulary has tokens, got 7"),
}


@pytest.mark.parametrize(("changed", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_refused(changed: dict[str, Any], message: str) -> None:
    arguments = {"logits": torch.zeros(2, 6), "token_ids": torch.zeros(2).long(), "count": 2}
    with pytest.raises(ValueError, match=message):
        token_logprobs(**(arguments | changed))
