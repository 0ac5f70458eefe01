"""Fuses linear layers that read the same input, as query, key and value projections do, into one product.

Which layers do so is observed: the model runs once, and layers that are called in succession with the same tensor are noted.
Only speed depends on it: a layer that is later called with another input computes the product then.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from radixkv.model.replacement.probe import watch_calls


class FusedProduct(ABC):
    """A product whose output has a part for each of several linears, computed when the first of them is called.

    Args:
        sizes: output features of each.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)
        # Kept until every linear has read its output, so that the input cannot be freed and its identity reused.
        self._input: torch.Tensor | None = None
        self._outputs: list[torch.Tensor | None] = []

    @abstractmethod
    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """All outputs, one after the other in the last dimension."""

    def output(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """What the linear with this index gives for ``x``."""
        if len(self._sizes) == 1:
            return self.compute(x)
        if x is not self._input or self._outputs[index] is None:
            self._input, self._outputs = x, list(self.compute(x).split(self._sizes, dim=-1))
        output = self._outputs[index]
        assert output is not None
        self._outputs[index] = None
        if all(unread is None for unread in self._outputs):
            self._input = None
        return output


def concatenated_bias(linears: Sequence[nn.Linear]) -> torch.Tensor | None:
    """The biases of all, zeros where one has none; None: none has."""
    if all(linear.bias is None for linear in linears):
        return None
    biases = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
        for linear in linears
    ]
    return torch.cat(biases)


def groups_by_input(
    model: nn.Module, linears: Sequence[nn.Linear], run_once: Callable[[], object], max_widening: float = math.inf
) -> list[list[nn.Linear]]:
    """Linears, grouped where they were called with the same tensor: one after another, or by the same module.

    Each is in one group; in none if its module was called without calling it, and so reads the weight itself.

    Calls by the same module need not be neighbours: latent attention calls other linears between those that compress queries
    and those that compress keys and values.

    Args:
        model: whose they are.
        linears: to be grouped.
        run_once: runs the model on any input.
        max_widening: output features of a group per input feature, at most.
    """
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    called_parents: set[nn.Module] = set()
    calls: list[tuple[nn.Linear, torch.Tensor]] = []

    def note(linear: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        calls.append((linear, args[0] if args else options["input"]))

    owners = {parents[linear] for linear in linears}
    with watch_calls(linears, note), watch_calls(owners, lambda parent, *_: called_parents.add(parent)):
        run_once()
    pending = dict.fromkeys(linears)
    groups: list[list[nn.Linear]] = []
    reading: dict[int, list[list[nn.Linear]]] = {}  # the groups of each tensor; `calls` keeps all of them alive
    for linear, x in calls:
        if linear not in pending:
            continue
        del pending[linear]
        for group in reversed(reading.setdefault(id(x), [])):
            width = linear.out_features + sum(member.out_features for member in group)
            is_near = group is groups[-1] or parents[group[0]] is parents[linear]
            if is_near and width <= max_widening * linear.in_features:
                group.append(linear)
                break
        else:
            groups.append([linear])
            reading[id(x)].append(groups[-1])
    return groups + [[linear] for linear in pending if parents[linear] not in called_parents]
