"""The exponentials and the tanh of the native code, to a few units in the last place, through what is computed with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.cpu_variants import each_variant, use

from radixkv_cpu import PagedAttention, RowKind, library, token_logprobs

pytestmark = pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")


def weights(scores: torch.Tensor, kind: RowKind, softcap: float | None = None) -> torch.Tensor:
    """Attention's weights of keys with these scores, for one query: the values are the unit vectors."""
    count = len(scores)
    keys, query = torch.zeros(count, 1, 1, 8), torch.zeros(1, 1, 8)
    keys[:, 0, 0, 0], query[0, 0, 0] = scores, 1.0
    attention = PagedAttention(
        row_ranges=np.array([[0], [1]]),
        tables=np.array([0]),
        key_ranges=np.array([[0], [count]]),
        block_ids=np.arange(count, dtype=np.int32)[None],
        positions=np.array([count - 1]),
        block_size=1,
        kinds=np.array([kind], dtype=np.int8),
    )
    return attention.attend(query, keys, torch.eye(count)[:, None, None], scale=1.0, softcap=softcap)[0, 0].double()


@each_variant
@pytest.mark.parametrize("kind", list(RowKind))
def test_weights(variant: str, kind: RowKind) -> None:
    scores = torch.linspace(-2.0, 0.0, 80)
    with use(variant):
        given = weights(scores, kind)
    torch.testing.assert_close(given, scores.double().softmax(0), rtol=6e-7, atol=0)


@each_variant
@pytest.mark.parametrize(("highest", "error"), [(1.5, 6e-7), (20.0, 2e-6)], ids=["near 0", "elsewhere"])
def test_weights_of_capped_scores(variant: str, highest: float, error: float) -> None:
    scores = torch.linspace(-highest, highest, 80)
    with use(variant):
        given = weights(scores, RowKind.DECODING, softcap=5.0)
    torch.testing.assert_close(given, (5.0 * (scores.double() / 5.0).tanh()).softmax(0), rtol=error, atol=0)


@each_variant
def test_totals_of_log_probabilities(variant: str) -> None:
    logits = -torch.linspace(0.7, 3.0, 80)[:, None].repeat(1, 33)
    logits[:, 0] = 0.0
    with use(variant):
        given = token_logprobs(logits, torch.zeros(80, dtype=torch.int64), 0).totals.double()
    torch.testing.assert_close(given, logits.double().logsumexp(1), rtol=0, atol=4e-7)
