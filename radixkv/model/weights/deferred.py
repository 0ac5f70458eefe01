"""Weights that are read from files one module at a time, when it is packed: the rest takes no memory.

Until then each matrix is a single zero, expanded to its shape, with which the model runs, though not with the right results.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from gguf import GGMLQuantizationType
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.initialization import no_init_weights

from radixkv.model.gguf import blocks as gguf_blocks
from radixkv.model.gguf.conversion import BLOCKS_FILE
from radixkv.model.weights.transformers_model import model_class
from radixkv_cpu import Blocks

ROWS_OF_A_PIECE = 4096
"""Rows that are read at a time of a tensor that is only compared."""


class WeightFiles(ABC):
    """Tensors by the names of a model's parameters and buffers.

    Attributes:
        has_blocks: whether `blocks` may give anything.
    """

    has_blocks = False

    @abstractmethod
    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of this name."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The weights, as floats."""

    def blocks(self, name: str) -> Blocks | None:
        """The weights as they are stored, if that is a kind that native code computes with."""
        return None


class BlockFile(WeightFiles):
    """What `radixkv.model.gguf.folder` writes.

    Args:
        folder: of a GGUF file that was converted.

    Raises:
        OSError, SafetensorError: the file is not there, or cannot be read; the latter names it.
    """

    has_blocks = True

    def __init__(self, folder: Path) -> None:
        # Read, not mapped: pages of a mapping would count beside what is made of them.
        self._file = _open(folder / BLOCKS_FILE)
        self._names = frozenset(self._file.keys())
        kinds = (self._file.metadata() or {}).get("kinds", "")
        try:
            self._kinds: dict[str, str] = {
                name: GGMLQuantizationType[kind].name for name, kind in json.loads(kinds).items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SafetensorError(
                f"{BLOCKS_FILE}: expected the kinds of its blocks in its metadata ({error!r})"
            ) from error

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        return gguf_blocks.dequantise(tensor, self._kinds[name]) if name in self._kinds else tensor

    def blocks(self, name: str) -> Blocks | None:
        kind = self._kinds.get(name, "")
        return gguf_blocks.unpack(self._file.get_tensor(name), kind) if kind in gguf_blocks.KINDS else None


class CheckpointFiles(WeightFiles):
    """A folder's safetensors.

    Args:
        paths: from `safetensors_of`.

    Raises:
        OSError, SafetensorError: they are not there, or cannot be read; the latter names the file.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        files = [_open(path) for path in paths]
        self._files: dict[str, Any] = {key: file for file in files for key in file.keys()}  # noqa: SIM118 (it is no dictionary)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def integers(self) -> dict[str, str]:
        """The tensors whose numbers are no floats, with their types as safetensors calls them."""
        types = {name: file.get_slice(name).get_dtype() for name, file in self._files.items()}
        return {name: kind for name, kind in types.items() if not kind.startswith(("F", "BF"))}

    def is_stored_as(self, name: str, other: str) -> bool:
        """Whether a tensor that is tied to another one is not stored, or stored with the same numbers."""
        if name not in self._files:
            return True
        pairs = zip_longest(self._pieces(name), self._pieces(other))
        return all(a is not None and b is not None and _are_equal(a, b) for a, b in pairs)

    def _pieces(self, name: str) -> Iterator[torch.Tensor]:
        """What `read` gives, a few rows at a time: a head can take gigabytes."""
        stored = self._files[name].get_slice(name)
        if not stored.get_shape():  # safetensors cuts no scalars
            yield self.read(name)
            return
        num_rows = stored.get_shape()[0]
        for start in range(0, num_rows, ROWS_OF_A_PIECE):
            yield stored[start : min(start + ROWS_OF_A_PIECE, num_rows)]

    def holds(self, model: nn.Module) -> bool:
        """Whether there is one tensor of the right shape for all that a model saves, tied or not, and of no other name."""
        tied: dict[int, list[str]] = {}
        wanted = model.state_dict(keep_vars=True)
        for name, tensor in wanted.items():
            tied.setdefault(id(tensor), []).append(name)
        return {*self._files} <= {*wanted} and all(
            (found := next((name for name in names if name in self._files), None)) == names[0]
            and self._files[found].get_slice(found).get_shape() == list(wanted[found].shape)
            and all(self.is_stored_as(name, found) for name in names[1:])
            for names in tied.values()
        )


def _are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers. Codes of one byte equal no other type: alone they are no numbers yet."""
    return (a.dtype == b.dtype or min(a.itemsize, b.itemsize) > 1) and torch.equal(a, b)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", backend="pread")
    except SafetensorError as error:
        raise SafetensorError(f"{path.name}: {error}") from error


class DeferredWeights:
    """A model's parameters that are in files.

    Args:
        model: of `build_without_weights`. Vectors and stored buffers, which are small, are filled at once.
        files: with all parameters of the model; of tied ones, the first.
    """

    def __init__(self, model: transformers.PreTrainedModel, files: WeightFiles) -> None:
        self._files = files
        self._names: dict[torch.Tensor, str] = {}
        self._placeholders: dict[torch.Tensor, torch.Tensor] = {}
        made: dict[torch.Tensor, nn.Parameter] = {}
        for name, empty in model.named_parameters():
            placeholder = torch.zeros((), dtype=empty.dtype).expand(empty.shape)
            made[empty] = parameter = nn.Parameter(placeholder, requires_grad=False)
            self._names[parameter], self._placeholders[parameter] = name, placeholder
            if empty.dim() == 1:
                self._fill(parameter)
        for module in model.modules():
            for key, old in module._parameters.items():
                if old is not None:
                    module._parameters[key] = made[old]
        for name, buffer in model.named_buffers():
            if name in files:
                buffer.copy_(files.read(name))

    @contextmanager
    def filled(self, module: nn.Module) -> Iterator[None]:
        """Within, a module has its weights; afterwards they are dropped."""
        pending = [(p, self._placeholders[p]) for p in module.parameters() if p in self._placeholders]
        try:
            for parameter, _ in pending:
                self._fill(parameter)
            yield
        finally:
            for parameter, placeholder in pending:
                parameter.data = self._placeholders[parameter] = placeholder

    def fill(self, model: nn.Module) -> None:
        """Read all weights that are not in memory yet, for good."""
        for parameter in model.parameters():
            if parameter in self._placeholders:
                self._fill(parameter)

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter's weights, wherever they are."""
        if parameter not in self._placeholders:
            return parameter
        return self._files.read(self._names[parameter]).to(parameter.dtype)

    @property
    def has_blocks(self) -> bool:
        """Whether `blocks` may return any."""
        return self._files.has_blocks

    def blocks(self, parameter: torch.Tensor) -> Blocks | None:
        """A parameter's blocks as its file stores them; None: there are none that native code computes with."""
        return self._files.blocks(self._names[parameter]) if parameter in self._names else None

    @torch.inference_mode(False)
    def _fill(self, parameter: nn.Parameter) -> None:
        parameter.data = self.read(parameter)
        del self._placeholders[parameter]


class ProductsOfZeros(TorchFunctionMode):
    """Within, products with expanded zeros are zeros: torch would first write them all out, and refuses to for experts."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.linear and len(args) == 3 and args[1].stride() == (0, 0):
            x, weight, bias = args
            zeros = x.new_zeros(*x.shape[:-1], len(weight))
            return zeros if bias is None else zeros + bias
        if func is torch._grouped_mm and not any(args[1].stride()):
            return args[0].new_zeros(len(args[0]), args[1].shape[-1])
        return func(*args, **(kwargs or {}))


def build_without_weights(config: Any, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """A model whose parameters are on torch's meta device, and whose buffers are as they are made from its configuration.

    It is made in float32, in which transformers computes buffers that are no part of a checkpoint, such as frequencies of
    rotary embeddings, whatever a model's type; everything else is then converted to ``dtype``.
    """
    with init_empty_weights(include_buffers=False), no_init_weights():
        model: transformers.PreTrainedModel = model_class(config).from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
    saved = model.state_dict(keep_vars=True).values()
    for tensor in [*model.parameters(), *(each for each in saved if not isinstance(each, nn.Parameter))]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    model.config.dtype = dtype
    model.tie_weights()
    return model
