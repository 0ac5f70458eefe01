"""Keys and values as float8_e4m3fn, a byte each, with a scale per layer and key-value head.

What is stored is ``value / scale``, rounded to the nearest float8 number and clamped to the largest, 448; what is read is
``stored * scale``. A scale is a power of two: dividing and multiplying by it is exact, so every backend rounds alike, and
what is read back is exact in bfloat16 and float16, too. A finer scale would gain nothing: the relative precision of float8 is
the same, 1 in 16, from ``scale / 64`` to ``448 * scale``; below, its absolute precision is ``scale / 1024``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from radixkv.memory.kv_pool import KVPool, LayerShape
from radixkv.memory.state_pool import StateShape

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0

# Scales leave room for numbers this many times larger than the largest measured, and up to twice that. float8's range of
# full precision spans a factor of 28,672, of which 8 can be spared.
HEADROOM = 4.0


@dataclass(frozen=True)
class KVScales:
    """The factors by which stored numbers are multiplied when they are read.

    Attributes:
        keys: float32 ``[kv heads]`` per layer, powers of two.
        values: likewise.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @classmethod
    def for_largest(
        cls, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], compute_dtype: torch.dtype
    ) -> KVScales:
        """Scales with `HEADROOM` over the largest absolute numbers seen.

        Args:
            keys, values: for each layer float32 ``[kv heads]``.
            compute_dtype: numbers that are read are converted to this type, and must be finite in it.

        Raises:
            ValueError: a number is not finite.
        """
        for name, layers in (("keys", keys), ("values", values)):
            for layer, largest in enumerate(layers):
                if not largest.isfinite().all():
                    raise ValueError(f"{name} of attention layer {layer} are not finite: {largest.tolist()}")
        return cls([_scales(k, compute_dtype) for k in keys], [_scales(v, compute_dtype) for v in values])


def _scales(largest: torch.Tensor, compute_dtype: torch.dtype) -> torch.Tensor:
    """The power of two for each head; 1 where nothing but zeros was seen."""
    highest = math.floor(math.log2(torch.finfo(compute_dtype).max / FP8_MAX))
    exponents = (largest.double() * HEADROOM / FP8_MAX).log2().ceil().clamp(-100, highest)
    return torch.where(largest > 0, torch.exp2(exponents), 1.0).float()


class Fp8KVPool(KVPool):
    """Blocks of float8_e4m3fn; otherwise a `KVPool`.

    Args:
        layers, num_blocks, block_size, device, recurrent_layers: as for `KVPool`.
        compute_dtype: what `write`, `read` and `gather` return.

    Raises:
        ValueError: a size is not positive, there is no layer, or the scales are not those of the layers.
        MemoryError: the tensors do not fit into the device's memory.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        scales: KVScales,
        compute_dtype: torch.dtype,
        device: torch.device | str = "cpu",
        recurrent_layers: Sequence[Sequence[StateShape]] = (),
    ) -> None:
        expected = [(shape.num_kv_heads,) for shape in layers]
        for name, own in (("keys", scales.keys), ("values", scales.values)):
            given = [tuple(scale.shape) for scale in own]
            if given != expected:
                raise ValueError(f"scales: expected shapes {expected} for {name}, got {given}")
        super().__init__(layers, num_blocks, block_size, FP8, device, recurrent_layers)
        self._key_scales = [scale.to(device) for scale in scales.keys]
        self._value_scales = [scale.to(device) for scale in scales.values]
        # Every float8 number in the compute type, indexed by its byte: torch's own conversion takes five times as long.
        bytes_ = torch.arange(256, dtype=torch.uint8, device=device)
        self._numbers = bytes_.view(FP8).to(compute_dtype)

    def scales(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 ``[kv heads]`` of keys and of values."""
        return self._key_scales[layer], self._value_scales[layer]

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens; see `KVPool.write`. Returns them as stored, rounded."""
        key_scale, value_scale = self.scales(layer)
        stored_key, stored_value = _narrow(key, key_scale), _narrow(value, value_scale)
        # As bytes: torch cannot copy rows of float8 by index.
        self.key_rows[layer].view(torch.uint8).index_copy_(0, slots, stored_key.view(torch.uint8))
        self.value_rows[layer].view(torch.uint8).index_copy_(0, slots, stored_value.view(torch.uint8))
        return self._widen(stored_key, key_scale), self._widen(stored_value, value_scale)

    def read(self, layer: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Consecutive token rows, widened; see `KVPool.read`."""
        key_scale, value_scale = self.scales(layer)
        keys, values = super().read(layer, start, stop)
        return self._widen(keys, key_scale), self._widen(values, value_scale)

    def gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token rows anywhere, widened; see `KVPool.gather`."""
        key_scale, value_scale = self.scales(layer)
        keys, values = super().gather(layer, slots)
        return self._widen(keys, key_scale), self._widen(values, value_scale)

    def _widen(self, stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """``[tokens, heads, dim]`` in the compute type."""
        index = stored.view(torch.uint8).to(torch.int32).reshape(-1)
        wide = self._numbers.index_select(0, index).view(stored.shape)
        return wide.mul_(scale.to(wide.dtype)[:, None])


def _narrow(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``[tokens, heads, dim]`` as float8; numbers too large become the largest one, which not every torch does itself."""
    return (numbers.float() / scale[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
