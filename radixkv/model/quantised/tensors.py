"""The tensors that a file has for one module of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from radixkv.errors import ModelLoadError
from radixkv.model.quantised.matrix import QuantisedMatrix

FLOATS = ("F32", "F16", "BF16")
"""Types of weights and scales, by safetensors' names."""


class UnreadableError(ModelLoadError):
    """A quantised checkpoint's tensors are not what its format says; the message names the tensor and what was expected."""


class OtherLayoutError(UnreadableError):
    """A layout that only transformers may read, such as separate tensors of experts that a model joins."""


class StoredMatrix(Protocol):
    """A quantised weight in a file, whose tensors have the right shapes and types."""

    def read(self) -> QuantisedMatrix:
        """Read it.

        Raises:
            UnreadableError: what the tensors hold is impossible.
        """


class ModuleTensors:
    """Tensors by the last part of their names.

    Args:
        files: what each tensor of the checkpoint is in: a file that safetensors has opened.
        module: name of the module.

    Attributes:
        used: names of the tensors whose shape or type was read.
    """

    def __init__(self, files: Mapping[str, Any], module: str) -> None:
        self._files = files
        self._module = module
        self.used: set[str] = set()

    def name(self, part: str) -> str:
        """A tensor's full name."""
        return f"{self._module}.{part}"

    def __contains__(self, part: str) -> bool:
        return self.name(part) in self._files

    def shape(self, part: str) -> list[int]:
        """A tensor's shape.

        Raises:
            UnreadableError: there is no such tensor.
        """
        return [*self._slice(part).get_shape()]

    def size(self, part: str, dim: int) -> int:
        """A tensor's size in one dimension; 0: it has no such dimension.

        Raises:
            UnreadableError: there is no such tensor.
        """
        shape = self.shape(part)
        return shape[dim] if dim < len(shape) else 0

    def dtype(self, part: str) -> str:
        """A tensor's type, by its name in safetensors.

        Raises:
            UnreadableError: there is no such tensor.
        """
        return str(self._slice(part).get_dtype())

    def check(self, part: str, shapes: Sequence[Sequence[float]], dtypes: Collection[str]) -> None:
        """Refuse a tensor that is not there, or of none of the shapes or types. A shape with fractions is impossible.

        Raises:
            UnreadableError: says so.
        """
        shape, dtype = self.shape(part), self.dtype(part)
        if shape not in [[*each] for each in shapes] or dtype not in dtypes:
            expected = " or ".join(f"[{', '.join(f'{size:g}' for size in each)}]" for each in shapes)
            raise UnreadableError(
                f"{self.name(part)}: expected shape {expected} of {' or '.join(dtypes)}, got {shape} of {dtype}"
            )

    def num_groups(self, part: str, shape: tuple[int, int]) -> int:
        """Groups of a feature by its scales: ``[features, groups]``, ``[features, 1]``, or one number.

        Args:
            part: the scales.
            shape: of the weight, ``[features, inputs]``.

        Raises:
            UnreadableError: they are not there, of another type or shape, or of groups that do not divide the inputs.
        """
        features, inputs = shape
        num_groups = self.size(part, 1) or 1
        # Groups that do not divide the inputs would be of no known size.
        in_groups = [[features, num_groups]] if inputs % num_groups == 0 else []
        self.check(part, [[], [1], [1, 1], [features, 1], *in_groups], FLOATS)
        return num_groups

    def read(self, part: str) -> torch.Tensor:
        """A tensor as it is stored."""
        tensor: torch.Tensor = self._files[self.name(part)].get_tensor(self.name(part))
        return tensor

    def read_scales(self, part: str) -> torch.Tensor:
        """Scales in float32.

        Raises:
            UnreadableError: not all are finite.
        """
        scales = self.read(part).float()
        if not scales.isfinite().all():
            raise UnreadableError(f"{self.name(part)}: expected finite numbers, got others among them")
        return scales

    def read_groups(self, part: str, num_groups: int) -> torch.Tensor:
        """The group of each input, int64 ``[inputs]``.

        Raises:
            UnreadableError: there is no such group.
        """
        groups = self.read(part).long()
        if groups.min() < 0 or groups.max() >= num_groups:
            lowest, highest = groups.min().item(), groups.max().item()
            raise UnreadableError(
                f"{self.name(part)}: expected groups from 0 to {num_groups - 1}, got {lowest} to {highest}"
            )
        return groups

    def siblings(self) -> str:
        """Names of all tensors of the module."""
        return ", ".join(sorted(name for name in self._files if name.rpartition(".")[0] == self._module))

    def _slice(self, part: str) -> Any:
        name = self.name(part)
        if name not in self._files:
            raise UnreadableError(f"{name}: there is no such tensor, which {self.siblings()} should have")
        self.used.add(name)
        return self._files[name].get_slice(name)
