"""Attention layers that project, norm and turn queries and keys, attend, and project back."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from radixkv.model.native.linear import is_replaceable
from radixkv.model.native.norm import NativeRMSNorm
from radixkv.model.native.weights import WeightKeeper, make_weight
from radixkv.model.replacement.attention_parts import attention_parts
from radixkv_cpu import rms_norm, rope_


class NativeSelfAttention(nn.Module):
    """Query, key and value as one product, normed and turned where they lie, and handed to the attention function.

    Args:
        attention: the module that it replaces, of which `is_candidate` holds; its norms are replaced already.
        options: those of `radixkv.model.attention_function.OPTIONS` that the module gives its attention function.
        keeper: of the weights; see `make_weight`.
    """

    def __init__(self, attention: nn.Module, options: dict[str, Any], keeper: WeightKeeper | None = None) -> None:
        super().__init__()
        parts = attention_parts(attention)
        assert parts is not None
        query, key, value, output = parts.projections
        self.layer_idx, self.head_dim = parts.layer_idx, parts.head_dim
        self.config: Any = attention.config
        self.num_query_heads = query.out_features // self.head_dim
        self.num_kv_heads = key.out_features // self.head_dim
        # What transformers' own attention functions read of a module.
        self.num_key_value_groups = self.num_query_heads // self.num_kv_heads
        self.is_causal = getattr(attention, "is_causal", True)
        together = (query, key, value)
        self.project = make_weight([p.weight for p in together], [p.bias for p in together], None, keeper)
        self.project_back = make_weight([output.weight], [output.bias], None, keeper)
        self.norms: tuple[NativeRMSNorm, NativeRMSNorm] | None = parts.norms
        self.options = options
        # Each file of transformers has a function of its own by this name, which is not among those that are registered.
        self._eager: Any = getattr(sys.modules[type(attention).__module__], "eager_attention_forward", None)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        *_: Any,
        cache: Any = None,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        # An engine runs one row without a mask or a cache; a call of the model itself may have all of these.
        batch = hidden_states.shape[:-1]
        num_query, num_kv, dim = self.num_query_heads, self.num_kv_heads, self.head_dim
        projected = self.project.multiply(hidden_states).reshape(-1, num_query + 2 * num_kv, dim)
        query, key, value = projected.split((num_query, num_kv, num_kv), dim=1)
        if self.norms is not None:
            for part, norm in zip((query, key), self.norms, strict=True):
                rms_norm(part, norm.scale, norm.epsilon, out=part)
        cos, sin = (part.expand(*batch, -1).flatten(0, 1) for part in position_embeddings)
        rope_(query, key, cos, sin)
        query, key, value = (part.unflatten(0, batch).transpose(1, 2) for part in (query, key, value))
        cache = past_key_values if cache is None else cache  # transformers before and since 5.40
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation, self._eager)
        output, _ = attend(self, query, key, value, attention_mask, **self.options)
        return self.project_back.multiply(output.flatten(-2)), None


def is_candidate(module: nn.Module) -> bool:
    """Whether the module has the parts that `NativeSelfAttention` is made of, and no others with parameters."""
    parts = attention_parts(module)
    return (
        parts is not None
        and all(map(is_replaceable, parts.projections))
        and all(isinstance(norm, NativeRMSNorm) and len(norm.scale) == parts.head_dim for norm in parts.norms or ())
    )
