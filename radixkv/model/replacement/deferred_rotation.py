"""Attention layers that leave the rotation of queries and keys to the kernel that writes into the cache.

A model's own code projects, rotates, and calls its attention function: two or more launches whose results are read once.
Where a layer has the parts of Llama's, and gives what `DeferredRotation` gives for random input, that stands in for it. What
it gains together with compiled layers and merged linear ones is in `radixkv.model.graphs.compiled_layers`; alone, it has not
been measured yet.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from radixkv.model.attention_function import OWN_NAMES
from radixkv.model.replacement.attention_parts import AttentionParts, attention_parts
from radixkv.model.replacement.equivalence import error_in_tolerances
from radixkv.model.replacement.probe import probe_attention, record_calls
from radixkv.model.replacement.replace_modules import replace_modules


class DeferredRotation(nn.Module):
    """Projects and norms; its attention function gets cosines and sines as ``rotary``, and query and key as they are.

    Args:
        attention: what it replaces, whose parts it takes over.
        parts: those that it computes with.
        options: those of `radixkv.model.attention_function.OPTIONS` that the module gives its attention function.

    Attributes:
        rotate_first: rotate here, for attention functions that take no ``rotary``.
        rotary_dim: dimensions of a head that are rotated; 0: not known yet.
    """

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, attention: nn.Module, parts: AttentionParts, options: dict[str, Any]) -> None:
        super().__init__()
        for name, part in attention.named_children():
            self.add_module(name, part)
        self.layer_idx, self.head_dim = parts.layer_idx, parts.head_dim
        self.config: Any = attention.config
        self.options = options
        self.rotate_first = True
        self.rotary_dim = 0
        # Not a part of it: its parts are.
        self._original = (attention,)

    @property
    def original(self) -> nn.Module:
        """What it replaces."""
        return self._original[0]

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        if self.config._attn_implementation not in OWN_NAMES:
            # No engine runs the model: it may have padding, or a cache of its own.
            own: tuple[torch.Tensor, Any] = self.original(hidden_states, position_embeddings, *args, **kwargs)
            return own
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        cosines, sines = position_embeddings
        options = dict(self.options)
        if self.rotate_first:
            self.rotary_dim = cosines.shape[-1]
            query, key = (_rotated(part, cosines, sines) for part in (query, key))
        else:
            options["rotary"] = cosines[0].contiguous(), sines[0].contiguous()
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        output, _weights = attend(self, query, key, value, None, **options)
        return self.o_proj(output.flatten(-2)), None


def _rotated(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """As `radixkv_kernels.rotate_and_write` does it, ``[1, heads, tokens, dim]``."""
    rotary_dim = cosines.shape[-1]
    x = heads[..., :rotary_dim].float()
    first, second = x.chunk(2, dim=-1)
    rotated = x * cosines.float() + torch.cat((-second, first), -1) * sines.float()
    return torch.cat((rotated.to(heads.dtype), heads[..., rotary_dim:]), -1)


def defer_rotation(model: transformers.PreTrainedModel) -> int:
    """Replace the attention layers that `DeferredRotation` gives the same results as; returns how many those are."""
    deferred: dict[nn.Module, DeferredRotation] = {}
    with torch.inference_mode(), probe_attention(model) as probe:
        record_calls(model, probe)
        for module in probe.calls:
            parts = attention_parts(module)
            if parts is not None and parts.layer_idx in probe.options and not isinstance(module, DeferredRotation):
                candidate = DeferredRotation(module, parts, probe.options[parts.layer_idx])
                if error_in_tolerances(candidate, module, probe) <= 1:
                    deferred[module] = candidate
    replace_modules(model, deferred)
    return len(deferred)


def restore_rotation(model: nn.Module) -> None:
    """Undo `defer_rotation`."""
    deferred = [module for module in model.modules() if isinstance(module, DeferredRotation)]
    replace_modules(model, {module: module.original for module in deferred})


def set_rotate_first(model: nn.Module, rotate_first: bool) -> None:
    """Set it of all layers, see `DeferredRotation`."""
    for module in model.modules():
        if isinstance(module, DeferredRotation):
            module.rotate_first = rotate_first
