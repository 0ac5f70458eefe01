"""The input of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.attention import QueryBatch
from radixkv.attention.query_batch import concatenated_ranges
from radixkv.memory.upload import to_device

# Instead of an index into the device's tokens: the token is on the host.
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

    def packed_tokens(
        self,
        order: NDArray[np.int64],
        row_starts: NDArray[np.int64],
        device: torch.device,
        device_tokens: torch.Tensor | None,
    ) -> torch.Tensor:
        """The tokens on the device in a backend's order, including those that never left it: int64 ``[tokens]``.

        Args:
            order: the sequences in that order.
            row_starts: where each one's tokens begin then.
            device: that the model is on.
            device_tokens: int64 tokens there, to which ``device_indices`` refer; None: all are known here.
        """
        num_new = self.queries.num_new
        starts = num_new.cumsum() - num_new
        known = self.token_ids[concatenated_ranges(starts[order], num_new[order])]
        token_ids = to_device(torch.from_numpy(known), device)
        indices = self.device_indices[order]
        (on_device,) = (indices != HOST_TOKEN).nonzero()
        if len(on_device):
            assert device_tokens is not None
            pairs = torch.from_numpy(np.stack((row_starts[on_device], indices[on_device])))
            rows, sources = to_device(pairs, device).unbind(0)
            token_ids[rows] = device_tokens[sources]
        return token_ids
