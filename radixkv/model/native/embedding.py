"""Token embeddings that share the weights of the output head."""

from __future__ import annotations

import torch
from torch import nn

from radixkv.model.replacement.replace_modules import is_unchanged
from radixkv_cpu import BlockWeight, PackedWeight, Weight


class NativeEmbedding(nn.Module):
    """Reads tokens' embeddings from packed weights: the head's, so that a tied weight is held once, or their own blocks.

    A row is scattered there, which costs little beside the rest of the model (docs/benchmarks/cpu.md has the figures).
    """

    def __init__(self, weight: PackedWeight | BlockWeight) -> None:
        super().__init__()
        self.num_embeddings = weight.out_features
        self.embedding_dim = weight.in_features
        self._packed = weight
        # It may be the model's only parameter left, and transformers takes dtype and device from one.
        self.weight = nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._packed.rows(token_ids)


def native_embedding(embedding: nn.Module, weight: Weight | None) -> NativeEmbedding | None:
    """A replacement for an embedding whose weight is also kept elsewhere, as ``weight``.

    None: its class may compute something else, or rows cannot be read from the kept weight as they were.
    """
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None or not is_unchanged(embedding):
        return None
    return NativeEmbedding(weight) if isinstance(weight, PackedWeight | BlockWeight) else None
