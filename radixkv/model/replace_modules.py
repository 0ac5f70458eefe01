"""Other modules in place of some of a model's."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def replace_modules(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Put others in place of some modules, wherever the model has them.

    Args:
        model: is changed; it is not replaced itself.
        replacements: by the modules that they stand in for.
    """
    for parent in [*model.modules()]:
        for name, child in [*parent.named_children()]:
            if child in replacements:
                setattr(parent, name, replacements[child])
