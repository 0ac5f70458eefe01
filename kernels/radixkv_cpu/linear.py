"""Linear layers whose weights are packed into panels of 32 output features; see ``src/linear.cpp`` for the layout."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch.nn import functional

from radixkv_cpu.checks import check_tensor
from radixkv_cpu.fields import pointers, sizes
from radixkv_cpu.library import require_library

PANEL = 32
ACTIVATIONS = MappingProxyType({"silu": 1, "gelu_tanh": 2, "gelu": 3, "relu": 4})
"""Activations of the gate of a gated layer, by the library's numbers for them."""

# Inputs in bfloat16 come in pairs, are not padded, and AMX reads so many of them at a time.
_BF16_INPUTS = 32
# The number of decoding rows where it is not known.
_NOT_KNOWN = -1


class _Linear(ctypes.Structure):
    """`Linear` of ``src/calls.h``."""

    _fields_ = (
        *pointers("x", "weight", "bias", "residual", "out"),
        *sizes("rows", "inputs", "outputs"),
        ("activation", ctypes.c_int32),
        ("format", ctypes.c_int32),
        *pointers("decoding"),
        *sizes("num_decoding"),
    )


class _Features(ctypes.Structure):
    """`Features` of ``src/calls.h``."""

    _fields_ = (
        *pointers("panels", "features", "out"),
        *sizes("rows", "words"),
    )


class Weight:
    """One or more weights ``[features, inputs]``, stacked, in the order in which products read them.

    Attributes:
        in_features: inputs of a row.
        out_features: features of a product; of a gated one, those of its gate.
        dtype: of inputs and products, float32 or bfloat16.
        panels: the weights in memory.
        num_weights: how many were stacked.
        kind: how they are quantised, in words; None: they are not.
    """

    def __init__(
        self,
        panels: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        activation: str | None,
        number_format: int = 0,
        kind: str | None = None,
    ) -> None:
        self.in_features = weights[0].shape[1]
        self.dtype = weights[0].dtype
        self.out_features = weights[0].shape[0] if activation else sum(len(weight) for weight in weights)
        self.panels = panels
        self.num_weights = len(weights)
        self.kind = kind
        self._bias: torch.Tensor | None = None
        if any(bias is not None for bias in biases):
            parts = [
                weight.new_zeros(len(weight)) if bias is None else bias.detach()
                for weight, bias in zip(weights, biases, strict=True)
            ]
            self._bias = torch.cat(parts)
        # The arguments common to all calls, each of which copies them: several threads may multiply by one weight.
        self._call = _Linear(
            weight=self.panels.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            inputs=self.in_features,
            outputs=self.out_features,
            activation=ACTIVATIONS[activation] if activation else 0,
            format=number_format,
            num_decoding=_NOT_KNOWN,
        )
        self._input_shape = (self.in_features,)
        self._is_bf16 = self.dtype == torch.bfloat16
        self._run = require_library().linear

    @property
    def address(self) -> int:
        """Address of a `Linear` of ``src/calls.h`` with the arguments common to all products; valid while this object is."""
        return ctypes.addressof(self._call)

    @property
    def is_gated(self) -> bool:
        """Whether a product is ``activation(x @ gate.T) * (x @ up.T)``."""
        return bool(self._call.activation)

    @property
    def nbytes(self) -> int:
        """Size of the panels, in bytes."""
        return self.panels.nbytes

    def move(self, panels: torch.Tensor) -> None:
        """Read the weights from other memory from now on; not to be called while a product is computed.

        Args:
            panels: equal to the present ones.

        Raises:
            ValueError: they are of another shape or type, or not on the CPU.
        """
        check_tensor("panels", panels, list(self.panels.shape), [self.panels.dtype])
        self.panels = panels
        self._call.weight = panels.data_ptr()

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias + residual``.

        Args:
            x: ``[..., inputs]``, of the weights' type.
            residual: ``[..., features]``, added before the result is rounded.

        Returns:
            ``[..., features]``.

        Raises:
            ValueError: a tensor is of another shape or type, or not on the CPU.
        """
        shape = x.shape
        if shape[-1:] != self._input_shape or x.dtype != self.dtype or not x.is_cpu:
            check_tensor("x", x, [*shape[:-1], self.in_features], [self.dtype], 0)
        x = x.contiguous()
        out = x.new_empty(*shape[:-1], self.out_features)
        call = _Linear.from_buffer_copy(self._call)
        call.x, call.out = x.data_ptr(), out.data_ptr()
        call.rows = x.numel() // self.in_features
        if residual is not None:
            if residual.shape != out.shape or residual.dtype != self.dtype or not residual.is_cpu:
                check_tensor("residual", residual, out.shape, [self.dtype], 0)
            residual = residual.contiguous()
            call.residual = residual.data_ptr()
        self._run(ctypes.addressof(call), self._is_bf16)
        return out

    def _check_features(self, features: torch.Tensor) -> None:
        """Refuse numbers of features whose weights cannot be read one by one."""
        if self.is_gated:
            raise ValueError("rows: the weights of a gated product lie in turns")
        if features.numel() and not 0 <= int(features.min()) <= int(features.max()) < self.out_features:
            raise IndexError(f"features: expected numbers from 0 to {self.out_features - 1}, got {features.tolist()}")


class PackedWeight(Weight):
    """Weights that keep their type.

    Args:
        weights: of one type, float32 or bfloat16, and of one number of inputs.
        biases: one per weight, or None.
        activation: a key of `ACTIVATIONS`: the weights are a gate and what it gates, without biases; products are
            ``activation(x @ gate.T) * (x @ up.T)``.

    Raises:
        ValueError: a weight is not `is_packable`; or the weights, their biases and the activation do not belong together.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None] = (),
        activation: str | None = None,
    ) -> None:
        check_weights(weights, biases, activation)
        # A gate and what it gates are packed from where they are: stacked first, each would be copied twice.
        super().__init__(pack(weights if activation else stack(weights, None)), weights, biases, activation)

    def rows(self, features: torch.Tensor) -> torch.Tensor:
        """The original weights of some features; of an output head, these are the embeddings of tokens.

        Args:
            features: ``[...]`` integers, their numbers.

        Returns:
            ``[..., inputs]``.

        Raises:
            ValueError: the weights are those of a gated product.
            IndexError: there is no such feature.
        """
        self._check_features(features)
        numbers = features.to(torch.int64).contiguous()
        rows = torch.empty(*features.shape, self.in_features, dtype=self.dtype)
        call = _Features(
            self.panels.data_ptr(), numbers.data_ptr(), rows.data_ptr(),
            numbers.numel(), self.in_features * self.dtype.itemsize // 4,
        )  # fmt: skip
        require_library().features(ctypes.addressof(call), False)
        return rows


def is_packable(weight: torch.Tensor) -> bool:
    """Whether a weight ``[features, inputs]`` can be packed."""
    if weight.dim() != 2 or weight.device.type != "cpu" or not weight.numel():
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and weight.shape[1] % _BF16_INPUTS == 0)


def check_weights(
    weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], activation: str | None
) -> None:
    """Refuse weights that cannot be packed, or do not go with each other, their biases and the activation.

    Raises:
        ValueError: names what was expected and what was given.
    """
    if not weights or not all(is_packable(weight) for weight in weights):
        shapes = [(list(weight.shape), weight.dtype) for weight in weights]
        raise ValueError(
            f"weights: expected float32, or bfloat16 with a multiple of {_BF16_INPUTS} inputs, on the CPU, got {shapes}"
        )
    first = weights[0]
    if activation is not None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {list(ACTIVATIONS)} or None, got {activation!r}")
        if len(weights) != 2:
            raise ValueError(f"weights: expected a gate and what it gates, got {len(weights)}")
        if any(bias is not None for bias in biases):
            raise ValueError("biases: a gated product has none")
    for i, weight in enumerate(weights):
        features = None if activation is None else len(first)
        check_tensor(f"weights[{i}]", weight, [features, first.shape[1]], [first.dtype], 0)
    if biases and len(biases) != len(weights):
        raise ValueError(f"biases: expected one for each of {len(weights)} weights, got {len(biases)}")
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=False)):
        if bias is not None:
            check_tensor(f"biases[{i}]", bias, [len(weight)], [first.dtype], 0)


def stack(weights: Sequence[torch.Tensor], activation: str | None) -> torch.Tensor:
    """``[1, features, inputs]``, or ``[2, features, inputs]`` where gate and up alternate by panels."""
    if len(weights) == 1:
        return weights[0].unsqueeze(0)  # no copy
    return torch.stack([*weights]) if activation else torch.cat([*weights]).unsqueeze(0)


def pack(weights: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Weights ``[features, inputs]`` to ``[panels, weights, inputs, 32]``, in bfloat16 ``[..., inputs / 2, 32, 2]``."""
    # torch moves pairs of inputs 2 to 5 times as fast as one word each.
    is_bf16 = weights[0].dtype == torch.bfloat16
    whole = [w.detach().contiguous() for w in weights]
    if is_bf16:  # a pair begins at a word
        whole = [w.clone() if w.storage_offset() % 2 else w for w in whole]
    words = [w.view(torch.int32) if is_bf16 else w for w in whole]
    features, num_words = words[0].shape
    panels = -(-features // PANEL)
    packed = words[0].new_empty(panels, len(words), num_words, PANEL)
    for place, part in zip(packed.unbind(1), words, strict=True):
        padded = functional.pad(part, (0, 0, 0, panels * PANEL - features)) if features % PANEL else part
        place.copy_(padded.unflatten(0, (panels, PANEL)).transpose(1, 2))
    return packed.view(torch.bfloat16).view(*packed.shape, 2) if is_bf16 else packed
