"""Decoder layers: ``x += attention(norm(x)); x += mlp(norm(x))``, in some models with norms before the additions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from radixkv.model.attention_function import OWN_NAMES, layer_options
from radixkv.model.forward_pass import running
from radixkv.model.native.attention import NativeSelfAttention
from radixkv.model.native.mlp import NativeGatedMLP
from radixkv.model.native.norm import NativeRMSNorm
from radixkv_cpu import DecoderLayer


class NativeDecoderLayer(nn.Module):
    """A layer made of native modules. If native code attends as well, one call computes it and the layers of its chain.

    Args:
        mlp: of any kind; one that is not a `NativeGatedMLP`, such as a mixture of experts, is called by itself.
        output_norms: of the outputs of attention and of the MLP, before they are added, as in Gemma 2; None: there are none.

    Attributes:
        layer: the layer for native code.
        chain: the layers that a call of this one computes, itself the first; `layer_chains` sets it. None: the call of an
            earlier layer has computed this one, whose own call returns its input.
    """

    chain: Sequence[NativeDecoderLayer] | None

    def __init__(
        self,
        input_norm: NativeRMSNorm,
        attention: NativeSelfAttention,
        post_norm: NativeRMSNorm,
        mlp: nn.Module,
        output_norms: tuple[NativeRMSNorm, NativeRMSNorm] | None = None,
    ) -> None:
        super().__init__()
        self.layer_idx = attention.layer_idx
        self.input_norm, self.attention, self.post_norm, self.mlp = input_norm, attention, post_norm, mlp
        self.attention_norm: nn.Module
        self.mlp_norm: nn.Module
        self.attention_norm, self.mlp_norm = output_norms or (nn.Identity(), nn.Identity())
        options = layer_options(attention.head_dim, attention.options)
        self.chain = [self]
        self.layer = DecoderLayer(
            input_norm, post_norm, attention.norms,
            attention.project, attention.project_back,
            (mlp.gate_up, mlp.down) if isinstance(mlp, NativeGatedMLP) else partial(_run_rows, mlp),
            attention.head_dim,
            output_norms=output_norms,
            scale=options.scale,
            softcap=options.softcap,
            window=options.sliding_window,
            sinks=None if options.sinks is None else options.sinks.detach().float().contiguous(),
        )  # fmt: skip

    def forward(
        self,
        hidden_states: torch.Tensor,
        *_: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **options: Any,
    ) -> torch.Tensor:
        if self.attention.config._attn_implementation not in OWN_NAMES:
            # No engine runs the model: it may have padding, or a cache of its own.
            return self.compute(hidden_states, position_embeddings, **options)
        if self.chain is None:
            return hidden_states
        forward_pass = running.get(None)
        if forward_pass is not None and forward_pass.run_chain is not None:
            return forward_pass.run_chain(self.chain, hidden_states, position_embeddings)
        for layer in self.chain:
            hidden_states = layer.compute(hidden_states, position_embeddings)
        return hidden_states

    def compute(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **options: Any
    ) -> torch.Tensor:
        """This layer's output alone; ``options`` are those of its attention."""
        attended = self.attention(self.input_norm(hidden_states), position_embeddings, **options)[0]
        hidden_states = hidden_states + self.attention_norm(attended)
        mlp: torch.Tensor = self.mlp_norm(self.mlp(self.post_norm(hidden_states)))
        return hidden_states + mlp


def native_layer(module: nn.Module) -> NativeDecoderLayer:
    """A layer that computes the same as a candidate, if that calls its parts in the usual order."""
    norms, [attention], [mlp] = _parts(module)
    if len(norms) == 2:
        input_norm, post_norm = norms
        return NativeDecoderLayer(input_norm, attention, post_norm, mlp)
    input_norm, attention_norm, post_norm, mlp_norm = norms
    return NativeDecoderLayer(input_norm, attention, post_norm, mlp, (attention_norm, mlp_norm))


def is_candidate(module: nn.Module) -> bool:
    """Whether the module has the parts that a `NativeDecoderLayer` is made of, and no others."""
    if isinstance(module, NativeDecoderLayer) or any(True for _ in module.parameters(recurse=False)):
        return False
    norms, attentions, others = _parts(module)
    return len(norms) in (2, 4) and len(attentions) == len(others) == 1


def _parts(module: nn.Module) -> tuple[list[NativeRMSNorm], list[NativeSelfAttention], list[nn.Module]]:
    """A module's norms, attention layers and other children."""
    children = [*module.children()]
    norms = [child for child in children if isinstance(child, NativeRMSNorm)]
    attentions = [child for child in children if isinstance(child, NativeSelfAttention)]
    return norms, attentions, [child for child in children if child not in norms and child not in attentions]


def _run_rows(mlp: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = mlp(rows.unsqueeze(0))[0]
    return output
