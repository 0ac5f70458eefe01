"""Random numbers that belong to a request: a pure function of its seed, the sample, the token's index and the candidate.

They come from SplitMix64 (Steele, Lea, Flood 2014), counted from an RNG state that the first three determine. All arithmetic
is in 64-bit integers, so that every device draws the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.memory.upload import to_device
from radixkv.sampling_params import SamplingParams

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


class SamplingRow(NamedTuple):
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
    keys = [(row.seed & (2**63 - 1), row.sample_index, row.token_index) for row in rows]
    seed, sample, index = np.array(keys, dtype=np.uint64).T
    states = _mix(seed + np.uint64(_GOLDEN))
    for number in (sample, index):
        states = _mix(states + (number + np.uint64(1)) * np.uint64(_GOLDEN))
    return to_device(torch.from_numpy(states.view(np.int64)), device)


def exponential_variates(states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Variates of mean 1, float32, on the host; never 0 or infinite.

    Args:
        states: RNG states, see `rng_states`.
        token_ids: int64, of a shape that broadcasts with ``states``; block b of a vocabulary counts as ``-2 - b``.
    """
    steps = (token_ids.numpy() + 1).view(np.uint64)
    bits = _mix(states.numpy().view(np.uint64) + steps * np.uint64(_GOLDEN))
    bits >>= np.uint64(11)
    # Rounded to float32 last: small variates decide the draw, and so keep their relative precision.
    uniform = torch.from_numpy(bits.view(np.int64)).double().mul_(2**-53).float()
    return uniform.clamp_(2**-60, 1 - 2**-24).neg_().log1p_().neg_()


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = x >> np.uint64(30)
    mixed ^= x
    mixed *= np.uint64(_MIX_1)
    shifted = mixed >> np.uint64(27)
    mixed ^= shifted
    mixed *= np.uint64(_MIX_2)
    np.right_shift(mixed, np.uint64(31), out=shifted)
    mixed ^= shifted
    return mixed
