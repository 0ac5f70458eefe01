"""Arguments that passed a check once pass for every tensor of the same layout.

All layers of a model launch the same kernels on tensors of the same shapes, batch after batch. Looking up a key of a few
numbers per tensor takes a fraction of the time of the checks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import torch

Params = ParamSpec("Params")

# Calls that each check remembers: layers differ in few ways, batches in more.
_REMEMBERED = 1024


def checked_once(check: Callable[Params, None]) -> Callable[Params, None]:
    """Remember which calls of a check passed, by the shapes, strides, types, devices and gradients of their tensors.

    The check must look at nothing else of a tensor. A call that fails is not remembered, and raises each time.
    """
    passed: dict[tuple[Any, ...], None] = {}

    @functools.wraps(check)
    def check_unless_passed(*args: Params.args, **options: Params.kwargs) -> None:
        current_device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        key = (
            current_device,
            torch.is_grad_enabled(),
            *map(_what_decides, args),
            *map(_what_decides, options.values()),
            *options,
        )
        if key not in passed:
            check(*args, **options)
            if len(passed) >= _REMEMBERED:
                passed.clear()
            passed[key] = None

    return check_unless_passed


def _what_decides(argument: Any) -> Any:
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument.shape, argument.stride(), argument.dtype, argument.device, argument.requires_grad
