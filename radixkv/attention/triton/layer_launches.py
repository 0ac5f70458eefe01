"""A batch's layers, one after the other: the first is checked and lowered to launches, and layers like it repeat these.

Before a kernel is launched, Python checks some ten tensors, and Triton some forty arguments; for the three or four launches
of a layer that takes longer than many GPUs need to run them. From layer to layer only a few pointers change.
"""

from __future__ import annotations

import abc

import torch

from radixkv.attention.options import AttentionOptions, NewTokens
from radixkv.attention.triton.launches import Launcher, LayerTensors
from radixkv.memory import KVPool
from radixkv_kernels import RepeatedLaunch

# What decides whether a checked and compiled launch fits another tensor. Triton compiles for alignment to 16 bytes.
_Layout = tuple[object, ...]
# A layer's keys, values and their scales in the pool, and how they lie.
PoolLayer = tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None], _Layout]


def pool_layers(pool: KVPool) -> list[PoolLayer]:
    """The layers of a pool, whose tensors must stay where they are."""
    layers: list[PoolLayer] = []
    for layer, (keys, values) in enumerate(zip(pool.keys, pool.values, strict=True)):
        tensors = (keys, values, *pool.scales(layer))
        layers.append((tensors, tuple(map(_layout, tensors))))
    return layers


class LayerLaunches(abc.ABC):
    """Attention that launches layer after layer of one batch, or of several in the same buffers."""

    def __init__(self, layers: list[PoolLayer]) -> None:
        self._layers = layers
        self._repeated: dict[_Layout, list[RepeatedLaunch]] = {}

    @abc.abstractmethod
    def launchers(self, tensors: LayerTensors, options: AttentionOptions) -> list[Launcher]:
        """A layer's launches, in order; for layers that are alike the same, apart from their tensors."""

    def attend(self, layer: int, new: NewTokens, options: AttentionOptions) -> torch.Tensor:
        """Write the batch's new keys and values into the pool, then attend; see `AttentionBatch.attend`."""
        query, key, value, rotary = new
        (keys, values, *scales), own_layout = self._layers[layer]
        key_scales, value_scales = scales
        size, device = (1, query.shape[2], query.shape[1]), query.device
        output = torch.empty(*size, value.shape[3], dtype=query.dtype, device=device)
        unrotated, cosines, sines = None, None, None
        if rotary is not None:
            (cosines, sines), unrotated = rotary, query
            query = torch.empty(*size, query.shape[3], dtype=query.dtype, device=device).transpose(1, 2)
        alike = (
            own_layout, _layout(query), _layout(key), _layout(value), _layout(unrotated), _layout(cosines), _layout(sines),
            options.scale, options.softcap, options.sliding_window, _layout(options.sinks),
            torch.is_grad_enabled(), torch.cuda.current_device() if device.type == "cuda" else None,
        )  # fmt: skip
        tensors = LayerTensors(
            query, key, value, output, keys, values, key_scales, value_scales, options.sinks, unrotated, cosines, sines
        )
        repeated = self._repeated.get(alike)
        if repeated is not None:
            # Tensors of the same layout need no view of the kernels' shape: only their addresses are passed.
            changing = tensors._asdict()
            for launch in repeated:
                launch(changing)
            return output
        viewed = tensors._replace(
            query=_rows(query),
            key=_rows(key),
            value=_rows(value),
            output=output[0],
            unrotated=None if unrotated is None else _rows(unrotated),
        )
        launches = [launcher() for launcher in self.launchers(viewed, options)]
        if None not in launches:  # otherwise kernels are interpreted
            self._repeated[alike] = [RepeatedLaunch(launch, LayerTensors._fields) for launch in launches if launch]
        return output


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """``[rows, heads, dim]`` of a model's ``[1, heads, rows, dim]``."""
    return tensor[0].transpose(0, 1)


def _layout(tensor: torch.Tensor | None) -> _Layout | None:
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16, tensor.requires_grad
