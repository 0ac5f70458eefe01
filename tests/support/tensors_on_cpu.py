"""Tensors that are asked for on a GPU lie on the CPU, for tests that pretend to have one."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Where a function is asked for a tensor on "cuda", it makes one on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [_on_cpu(arg) for arg in args]
        return function(*args, **{name: _on_cpu(arg) for name, arg in (kwargs or {}).items()})


def _on_cpu(arg: Any) -> Any:
    on_gpu = (isinstance(arg, str) and arg == "cuda") or (isinstance(arg, torch.device) and arg.type == "cuda")
    return torch.device("cpu") if on_gpu else arg
