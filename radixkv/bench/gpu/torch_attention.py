"""Checks that torch's own attention is really computed by one chosen backend."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from radixkv.bench.gpu.report import UnavailableError

# The operators that each backend launches; on a CPU, as in tests, its own flash attention.
OPERATORS = MappingProxyType(
    {
        SDPBackend.FLASH_ATTENTION: (
            "aten._scaled_dot_product_flash_attention",
            "aten._scaled_dot_product_flash_attention_for_cpu",
        ),
        SDPBackend.CUDNN_ATTENTION: ("aten._scaled_dot_product_cudnn_attention",),
    }
)


class _Operators(TorchDispatchMode):
    """Notes the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def require_backend(backend: SDPBackend, attend: Callable[[], object]) -> None:
    """Run ``attend`` once, and check that this backend computes it; `sdpa_kernel` must be in force.

    Raises:
        UnavailableError: the backend refuses the problem, with torch's reasons; or something else computed it.
    """
    with warnings.catch_warnings(record=True) as reasons, _Operators() as operators:
        warnings.simplefilter("always")
        try:
            attend()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "kernel" not in str(error).lower():
                raise
            said = "; ".join(dict.fromkeys(str(reason.message).split(" (Triggered")[0] for reason in reasons))
            raise UnavailableError(f"torch's {backend.name}: {error} {said}".strip()) from error
    if not operators.names.intersection(OPERATORS[backend]):
        ran = ", ".join(sorted(name for name in operators.names if "attention" in name)) or "no attention operator"
        raise UnavailableError(f"torch's {backend.name} was asked for, and what ran was {ran}")
