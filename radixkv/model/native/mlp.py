"""Gated multi-layer perceptrons (Shazeer 2020): ``down(activation(gate(x)) * up(x))``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from radixkv.model.native.linear import is_replaceable
from radixkv.model.native.weights import WeightKeeper, make_weight

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "silu": functional.silu,
        "gelu_tanh": partial(functional.gelu, approximate="tanh"),
        "gelu": functional.gelu,
        "relu": functional.relu,
    }
)


class NativeGatedMLP(nn.Module):
    """Gate and up projections as one product, whose results are combined before they are written.

    Args:
        mlp: the module that it replaces, of which `is_candidate` holds.
        keeper: of the weights; see `make_weight`.
    """

    def __init__(self, mlp: nn.Module, keeper: WeightKeeper | None) -> None:
        super().__init__()
        parts: dict[str, Any] = dict(mlp.named_children())
        gate, up, down = (parts[f"{name}_proj"] for name in ("gate", "up", "down"))
        self.gate_up = make_weight([gate.weight, up.weight], (), name_of_activation(mlp.act_fn), keeper)
        self.down = make_weight([down.weight], [down.bias], None, keeper)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down.multiply(self.gate_up.multiply(x))


def is_candidate(module: nn.Module) -> bool:
    """Whether the module has the parts that `NativeGatedMLP` is made of, and no others with parameters."""
    children: dict[str, Any] = dict(module.named_children())
    gate, up, down = (children.pop(f"{name}_proj", None) for name in ("gate", "up", "down"))
    if any(part is None or not is_replaceable(part) for part in (gate, up, down)):
        return False
    if gate.bias is not None or up.bias is not None or gate.weight.shape != up.weight.shape:
        return False
    if any(True for child in children.values() for _ in child.parameters()):
        return False
    return name_of_activation(getattr(module, "act_fn", None)) is not None


def name_of_activation(activation: Any) -> str | None:
    """The activation by what it does: it has many names and classes."""
    if not callable(activation):
        return None
    # Far out, too: some are cut off at 6 or 10.
    x = torch.cat([torch.linspace(-6, 6, 97), torch.tensor([-1e3, -30, -12, -8, 8, 12, 30, 1e3])])
    given = activation(x)
    for name, function in _ACTIVATIONS.items():
        if torch.allclose(given, function(x), rtol=1e-6, atol=1e-6):
            return name
    return None
