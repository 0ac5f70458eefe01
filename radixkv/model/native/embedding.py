"""Token embeddings that are the weights of the output head, too."""

from __future__ import annotations

import torch
from torch import nn

from radixkv.model.shared_input import is_unchanged
from radixkv_cpu import BlockWeight, PackedWeight, Weight


class NativeEmbedding(nn.Module):
    """Reads tokens' embeddings out of packed weights: the head's, so that a tied weight is held once, or their own blocks.

    A row is not in one piece there, which costs little beside the rest of the model (docs/benchmarks/cpu.md has the figures).

    Args:
        weight: of the head, or the embeddings alone, kept in blocks.
    """

    def __init__(self, weight: PackedWeight | BlockWeight) -> None:
        super().__init__()
        self.num_embeddings = weight.out_features
        self.embedding_dim = weight.in_features
        self._packed = weight
        # Of all parameters it may be the only one left, from which transformers takes the model's dtype and device.
        self.weight = nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._packed.rows(token_ids)


def native_embedding(embedding: nn.Module, weight: Weight | None) -> NativeEmbedding | None:
    """What can stand in for an embedding.

    Args:
        weight: the embeddings as they are kept elsewhere.

    Returns:
        None: the embedding is of a class that may compute something else, or rows of the weight are not what they were.
    """
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None or not is_unchanged(embedding):
        return None
    return NativeEmbedding(weight) if isinstance(weight, PackedWeight | BlockWeight) else None
