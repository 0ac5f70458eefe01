"""Other modules in place of some of a model's, and which of those may be replaced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeGuard, cast

import torch
import transformers
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


def refuse_saving(model: transformers.PreTrainedModel, name: str) -> None:
    """Let a model raise an error where it would write a checkpoint without the weights that its replaced modules have.

    Args:
        model: of which modules were replaced.
        name: of the model.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"{name}: its weights were packed for this machine when it was given to an LLM; save it, or take its "
            "state_dict, before that"
        )

    model.register_state_dict_pre_hook(refuse)
    vars(model)["save_pretrained"] = refuse  # which writes a configuration first


def refuse_conversion(model: transformers.PreTrainedModel, name: str) -> None:
    """Let a model raise an error where it would get another type or device, which the weights of its replaced modules keep.

    Calls that change neither, such as ``model.to(model.device)``, still succeed.

    Args:
        model: of which modules were replaced.
        name: of the model.
    """
    dtype, device, kind = model.dtype, model.device, type(model)
    weak = weakref.ref(model)  # a cycle would keep the weights in memory until the next garbage collection

    def apply_if_unchanged(function: Callable[[torch.Tensor], torch.Tensor], *args: Any, **options: Any) -> Any:
        converted = function(torch.empty(0, dtype=dtype, device=device))
        if (converted.dtype, converted.device) != (dtype, device):
            raise RuntimeError(
                f"{name}: expected {dtype} on {device}, for which its weights were packed when it was given to an LLM, got "
                f"{converted.dtype} on {converted.device}; convert or move it before that"
            )
        return kind._apply(cast(Any, weak()), function, *args, **options)

    vars(model)["_apply"] = apply_if_unchanged


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is an `nn.Linear` as torch defines it: subclasses, and weights of a class of their own, may compute
    something else."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and is_unchanged(module)


def is_unchanged(module: nn.Module) -> bool:
    """Whether neither the module nor its parts have hooks or a ``forward`` of their own, which a replacement would lose."""
    return not any(
        part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in module.modules()
    )
