"""Traces written by hand, of blocks of ten tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from radixkv.observe.simulate.trace import Trace, TracedRequest

BLOCK_SIZE = 10


def traced(time: float, prompt: Sequence[int], answer: Sequence[int] = (), num_output_tokens: int = 0) -> TracedRequest:
    """A request by the blocks of its prompt and its answer."""
    blocks = [np.array(part, dtype=np.int32) for part in (prompt, answer)]
    return TracedRequest(time, *blocks, num_output_tokens=num_output_tokens)


def trace_of(prompts: Iterable[Sequence[int]]) -> Trace:
    """A prompt each second."""
    return Trace([traced(float(time), prompt) for time, prompt in enumerate(prompts)], BLOCK_SIZE)
