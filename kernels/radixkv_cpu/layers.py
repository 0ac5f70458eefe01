"""Decoder layers, one after the other, in one call of the library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from radixkv_cpu.attention import PagedAttention
from radixkv_cpu.checks import check_tensor
from radixkv_cpu.fields import pointers, sizes
from radixkv_cpu.layer import DecoderLayer, LayerStruct
from radixkv_cpu.library import require_library


class _Layers(ctypes.Structure):
    """`Layers` of ``src/calls.h``."""

    _fields_ = (
        *pointers("layers", "x", "out", "normed", "kept", "decoding"),
        *sizes("num_layers", "rows", "num_decoding", "rotary_dim"),
        *pointers("cos", "sin", "slots", "attention", "last_attention"),
    )


class DecoderLayers:
    """Decoder layers over their caches, each of which takes the rows that the one before it returned.

    Args:
        layers: of one width and type. A layer whose MLP is of another kind must be the only one.
        keys: each layer's cache, ``[blocks, block size, kv heads, head dim]``, of the layers' type.
        values: likewise.

    Raises:
        ValueError: the layers do not belong together, or a cache is not as above.
    """

    def __init__(
        self, layers: Sequence[DecoderLayer], keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> None:
        if not layers or len(keys) != len(layers) or len(values) != len(layers):
            raise ValueError(
                f"layers: expected at least one, and keys and values of each, got {len(layers)}, {len(keys)}, {len(values)}"
            )
        first = layers[0]
        for i, layer in enumerate(layers):
            if (layer.dtype, layer.width) != (first.dtype, first.width):
                raise ValueError(
                    f"layers[{i}]: expected {first.dtype} and width {first.width}, got {layer.dtype} and {layer.width}"
                )
            if not layer.is_whole and len(layers) > 1:
                raise ValueError(f"layers[{i}]: expected one with a gated MLP among {len(layers)} layers")
            cache = [*keys[0].shape[:2], layer.num_kv_heads, layer.head_dim]
            check_tensor(f"keys[{i}]", keys[i], cache, [first.dtype])
            check_tensor(f"values[{i}]", values[i], cache, [first.dtype])
        self._dtype, self._width, self._block_size = first.dtype, first.width, keys[0].shape[1]
        self._most_rotary = min(layer.head_dim for layer in layers)
        self._only = None if first.is_whole else first
        self._layers = (LayerStruct * len(layers))(*(layer.struct for layer in layers))
        for struct, layer_keys, layer_values in zip(self._layers, keys, values, strict=True):
            struct.keys, struct.values = layer_keys.data_ptr(), layer_values.data_ptr()
        self._kept = [*layers], [*keys], [*values]  # the library reads them at every call
        self._is_bf16 = self._dtype == torch.bfloat16
        self._run = require_library().layers

    def run(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        attention: PagedAttention,
        kept: tuple[torch.Tensor, PagedAttention] | None = None,
        decoding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute rows, whose keys and values are written into the caches.

        Args:
            x: ``[rows, width]``, of the layers' type.
            cos: ``[rows, rotary dim]``, likewise.
            sin: likewise.
            slots: int64 ``[rows]``: where the rows' keys and values go, no two alike. It is not checked that the caches have
                them.
            attention: over the batch.
            kept: int64, ascending: the rows for which the last layer computes more than keys and values, and attention over
                these; None: all. Not checked.
            decoding: int64, ascending: the rows that a token of the answer follows, which are last known tokens, also of
                prompts, and drafts; None: there are none. Not checked. Their products may be computed in another way than
                those of a prompt's rows; see ``src/factored.h`` and ``src/triples.h``.

        Returns:
            ``[kept rows, width]``.

        Raises:
            ValueError: a tensor is not as above; nothing is written.
        """
        rows = attention.num_rows
        check_tensor("x", x, [rows, self._width], [self._dtype])
        check_tensor("cos", cos, [rows, None], [self._dtype])
        check_tensor("sin", sin, [rows, cos.shape[1]], [self._dtype])
        check_tensor("slots", slots, [rows], [torch.int64])
        if cos.shape[1] > self._most_rotary or cos.shape[1] % 2:
            raise ValueError(
                f"cos: expected an even number of dimensions up to {self._most_rotary}, got {list(cos.shape)}"
            )
        kept_rows, last_attention = kept or (None, attention)
        for each in (attention, last_attention):
            if each.block_size != self._block_size:
                raise ValueError(f"attention: expected blocks of {self._block_size} tokens, got {each.block_size}")
        if kept_rows is not None:
            check_tensor("kept", kept_rows, [last_attention.num_rows], [torch.int64])
            if len(kept_rows) > rows:
                raise ValueError(f"kept: expected at most {rows} rows, got {len(kept_rows)}")
        if decoding is not None:
            check_tensor("decoding", decoding, [None], [torch.int64])
        out = x.new_empty(last_attention.num_rows, self._width)
        normed = None if self._only is None else torch.empty_like(out)
        call = _Layers(
            ctypes.addressof(self._layers), x.data_ptr(), out.data_ptr(), None if normed is None else normed.data_ptr(),
            None if kept_rows is None else kept_rows.data_ptr(), None if decoding is None else decoding.data_ptr(),
            len(self._layers), rows, 0 if decoding is None else len(decoding), cos.shape[1],
            cos.data_ptr(), sin.data_ptr(), slots.data_ptr(), attention.address, last_attention.address,
        )  # fmt: skip
        self._run(ctypes.addressof(call), self._is_bf16)
        if self._only is not None and normed is not None:
            self._only.add_mlp(out, normed)
        return out
