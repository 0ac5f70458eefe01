"""Checks whether answers can be continued elsewhere, as far as that is possible without the model."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.outputs import CompletionOutput
from radixkv.sampling_params import SamplingParams


def check_resumable(params: SamplingParams, outputs: Sequence[CompletionOutput]) -> None:
    """Refuse what cannot be continued.

    Raises:
        ValueError: there is neither a seed nor greedy sampling, or not one output for each sample.
    """
    if params.seed is None and not params.greedy:
        raise ValueError(
            "resume: expected params with a seed, or greedy ones: the engine's own seed is not known elsewhere"
        )
    indices = [output.index for output in outputs]
    if sorted(indices) != list(range(params.n)):
        raise ValueError(f"resume: expected one output for each of n={params.n} samples, got those of {indices}")
