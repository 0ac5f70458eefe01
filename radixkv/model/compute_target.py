"""Where a model computes, in which type, and whether native code computes for it."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch

from radixkv.config import ModelConfig
from radixkv_cpu import NATIVE_DTYPES, library

_DTYPES = MappingProxyType(
    {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float": torch.float32,
        "half": torch.float16,
    }
)


@dataclass(frozen=True, slots=True)
class ComputeTarget:
    """Where and how a model computes.

    Attributes:
        device: a CPU or a CUDA device.
        dtype: of weights and activations.
        native: on a CPU, whether native code may stand in for the model's modules.
    """

    device: torch.device
    dtype: torch.dtype
    native: bool

    @classmethod
    def of(cls, config: ModelConfig, native: bool) -> ComputeTarget:
        """The target that a configuration selects.

        Raises:
            ValueError: ``device`` or ``dtype`` is impossible on this machine.
        """
        device = _resolve_device(config.device)
        return cls(device, _resolve_dtype(config.dtype, device, native), native)

    @property
    def native_unsupported_reason(self) -> str | None:
        """Why native code cannot compute the model's linear layers, and what to do; None: it can."""
        if self.device.type != "cpu":
            return f"not on {self.device.type}: use a CPU"
        if not self.native:
            return "not what torch's compiler traces: leave enable_torch_compile off"
        if self.dtype not in NATIVE_DTYPES:
            return f"with float32 or bfloat16 inputs, not {str(self.dtype).removeprefix('torch.')}: use another dtype"
        return "and none of its variants runs here" if library() is None else None

    def check_quantization(self, quantization: str | None) -> None:
        """Refuse it where nothing could compute with it.

        Raises:
            ValueError: says what is possible.
        """
        reason = None if quantization is None else self.native_unsupported_reason
        if reason is not None:
            raise ValueError(f"quantization: {quantization!r} is computed by native code for CPUs, {reason}, or None")


def _resolve_device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device: expected 'auto', 'cpu' or 'cuda', got {device!r}") from error
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if parsed.type not in ("cpu", "cuda") or (parsed.type == "cuda" and (parsed.index or 0) >= num_gpus):
        raise ValueError(
            f"device: expected a CPU or a CUDA device, of which this machine has {num_gpus}, got {device!r}"
        )
    return parsed


def _resolve_dtype(dtype: str | torch.dtype, device: torch.device, native: bool) -> torch.dtype:
    if isinstance(dtype, torch.dtype) and dtype in _DTYPES.values():
        return dtype
    if dtype == "auto":
        found = library() if native else None
        return torch.bfloat16 if device.type == "cuda" or (found and found.is_fast_in_bf16) else torch.float32
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"dtype: expected 'auto' or one of {sorted(_DTYPES)}, got {dtype!r}")
    return _DTYPES[dtype]
