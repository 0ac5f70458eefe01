"""Mixtures of experts: the gated MLPs that a router chose for each token."""

from __future__ import annotations

import torch
from torch import nn

from radixkv.model.native.mlp import name_of_activation
from radixkv.model.native.weights import WeightKeeper, make_weight
from radixkv_cpu import Experts
from radixkv_cpu.linear import PANEL, is_packable


class NativeExperts(nn.Module):
    """All experts' projections in two products, of which each token computes those of its experts.

    Args:
        experts: the module that it replaces, of which `is_candidate` holds.
        keeper: of the weights; see `make_weight`.
    """

    def __init__(self, experts: nn.Module, keeper: WeightKeeper | None) -> None:
        super().__init__()
        gate_up, down = _matrices(experts)
        gate, up = (part.flatten(0, 1) for part in gate_up.chunk(2, dim=1))
        self.gate_up = make_weight([gate, up], (), name_of_activation(experts.act_fn), keeper)
        self.down = make_weight([down.flatten(0, 1)], (), None, keeper)
        self._experts = Experts(self.gate_up, self.down, len(down))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        chosen, weights = top_k_index.contiguous(), top_k_weights.float().contiguous()
        return self._experts.run(hidden_states.contiguous(), chosen, weights)


def is_candidate(module: nn.Module) -> bool:
    """Whether the module has the parameters that `NativeExperts` is made of, and no others.

    transformers holds them for all experts in one: ``gate_up_proj [experts, 2 * inner, width]``, the gates first, and
    ``down_proj [experts, width, inner]``.
    """
    if {name for name, _ in module.named_parameters()} != {"gate_up_proj", "down_proj"}:
        return False
    gate_up, down = _matrices(module)
    if gate_up.dim() != 3 or down.dim() != 3:
        return False
    num_experts, width, inner = down.shape
    fits = gate_up.shape == (num_experts, 2 * inner, width) and not width % PANEL and not inner % PANEL
    if not fits or not is_packable(gate_up[0]) or not is_packable(down[0]):
        return False
    return name_of_activation(getattr(module, "act_fn", None)) is not None


def _matrices(experts: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    parameters = dict(experts.named_parameters())
    return parameters["gate_up_proj"].detach(), parameters["down_proj"].detach()
