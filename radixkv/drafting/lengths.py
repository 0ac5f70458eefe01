"""How many tokens of each draft are worth their rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixkv.drafting.step_times import StepTimes


def choose_lengths(
    rates: Sequence[float],
    max_lengths: Sequence[int],
    num_rows: int,
    num_sampled: int,
    times: StepTimes,
    max_rows: int,
) -> list[int]:
    """How many tokens of each draft to verify, so that the step is expected to yield the most tokens per second.

    The i-th token of a draft is kept with probability ``rate ** i``. The likeliest tokens of all drafts come first.

    Args:
        rates: of each draft, how likely a token is right if those before it are.
        max_lengths: tokens of each draft.
        num_rows: rows of the step without drafts.
        num_sampled: tokens that it yields without drafts.
        times: of steps by number of rows.
        max_rows: most rows for drafts.
    """
    if not rates:
        return []
    lengths = np.array(max_lengths)
    exponents = np.arange(1, max(max_lengths) + 1)
    gains = np.array(rates)[:, None] ** exponents
    gains[exponents > lengths[:, None]] = 0.0
    flat = gains.reshape(-1)
    count = min(int((flat > 0).sum()), max_rows)
    order = np.argsort(-flat, kind="stable")[:count]
    tokens = num_sampled + np.concatenate(([0.0], flat[order].cumsum()))
    seconds = times.predict(num_rows + np.arange(count + 1))
    best = int((tokens / seconds).argmax())
    chosen = np.zeros(len(flat), dtype=np.bool_)
    chosen[order[:best]] = True
    result: list[int] = chosen.reshape(gains.shape).sum(1).tolist()
    return result
