"""The input of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixkv.attention import QueryBatch

# Instead of an index into the device's tokens: the host knows the token.
HOST_TOKEN = -1


@dataclass(slots=True)
class ModelInput:
    """One packed forward pass, column by column.

    Attributes:
        token_ids: int64 ``[tokens]``: the sequences' new tokens, one sequence after the other.
        queries: the sequences' block tables, and how many tokens they have in them and add.
        num_logits: int64 ``[sequences]``: for how many of its last tokens each sequence needs logits.
        device_indices: int64 ``[sequences]``: where among the tokens on the device a sequence's only new token is;
            `HOST_TOKEN`: its tokens are in ``token_ids``.
    """

    token_ids: NDArray[np.int64]
    queries: QueryBatch
    num_logits: NDArray[np.int64]
    device_indices: NDArray[np.int64]
