"""A decoder layer in one call of the library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

import torch

from radixkv_cpu.attention import PagedAttention
from radixkv_cpu.checks import IS_BF16, check_tensor
from radixkv_cpu.elementwise import rms_norm
from radixkv_cpu.library import require_library
from radixkv_cpu.linear import Weight

_CALL_POINTERS = ("x", "out", "normed", "kept", "decoding")
_NORMS = ("input", "post", "query", "key", "attention", "mlp")
_WEIGHTS = ("project", "project_back", "gate_up", "down")
_HEADS = ("num_query_heads", "num_kv_heads", "head_dim", "rotary_dim")
_CACHE_POINTERS = ("cos", "sin", "keys", "values", "slots", "attention", "sinks")


class _Layer(ctypes.Structure):
    """`Layer` of ``src/calls.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _CALL_POINTERS),
        *((name, ctypes.c_int64) for name in ("rows", "width", "num_decoding")),
        *((f"{name}_norm", ctypes.c_void_p) for name in _NORMS),
        *((f"{name}_epsilon", ctypes.c_float) for name in _NORMS),
        *((name, ctypes.c_void_p) for name in _WEIGHTS),
        *((name, ctypes.c_int64) for name in _HEADS),
        *((name, ctypes.c_void_p) for name in _CACHE_POINTERS),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class RMSNorm(Protocol):
    """An RMS norm.

    Attributes:
        scale: float32 ``[dim]``, what a normalised vector is multiplied by.
        epsilon: what is added to its mean square.
    """

    scale: torch.Tensor
    epsilon: float


class DecoderLayer:
    """``x += attention(norm(x)); x += mlp(norm(x))`` over paged keys and values; what is added may be normed, too.

    Args:
        input_norm: before attention, ``[width]``.
        post_norm: before the MLP, ``[width]``.
        head_norms: of queries and of keys, ``[head dim]``; None: they are not normed.
        project: to query, key and value, one below the other.
        project_back: of what attention gives.
        mlp: gated, with an activation, and back to the layer's width; or what computes an MLP of another kind, of
            rows that are normed.
        head_dim: of queries, keys and values.
        output_norms: of what attention and the MLP give, before it is added, ``[width]``; None: they are not normed.
        scale: scores are multiplied by it.
        softcap: as `PagedAttention.attend` takes it.
        window: likewise.
        sinks: likewise.

    Raises:
        ValueError: the parts do not belong together.
    """

    def __init__(
        self,
        input_norm: RMSNorm,
        post_norm: RMSNorm,
        head_norms: tuple[RMSNorm, RMSNorm] | None,
        project: Weight,
        project_back: Weight,
        mlp: tuple[Weight, Weight] | Callable[[torch.Tensor], torch.Tensor],
        head_dim: int,
        *,
        output_norms: tuple[RMSNorm, RMSNorm] | None = None,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.dtype, self.width, self.head_dim = project.dtype, project.in_features, head_dim
        self.num_query_heads = project_back.in_features // head_dim
        self.num_kv_heads = (project.out_features // head_dim - self.num_query_heads) // 2
        gated = mlp if isinstance(mlp, tuple) else ()
        weights = (project, project_back, *gated)
        given = [(weight.dtype, weight.in_features, weight.out_features) for weight in weights]
        expected = [
            (self.dtype, self.width, (self.num_query_heads + 2 * self.num_kv_heads) * head_dim),
            (self.dtype, self.num_query_heads * head_dim, self.width),
        ]
        if gated:
            inner = gated[1].in_features
            expected += [(self.dtype, self.width, inner), (self.dtype, inner, self.width)]
        if given != expected or not self.num_kv_heads or self.num_query_heads % self.num_kv_heads:
            raise ValueError(f"weights: expected a layer with heads of {head_dim}, got (type, inputs, outputs) {given}")
        all_norms = (input_norm, post_norm, *(head_norms or (None, None)), *(output_norms or (None, None)))
        norms = {name: norm for name, norm in zip(_NORMS, all_norms, strict=True) if norm is not None}
        for name, norm in norms.items():
            check_tensor(
                f"{name}_norm", norm.scale, [head_dim if name in ("query", "key") else self.width], [torch.float32]
            )
        if sinks is not None:
            check_tensor("sinks", sinks, [self.num_query_heads], [torch.float32])
        # The library reads them at every call.
        self._kept = weights, norms, sinks
        self._mlp = None if isinstance(mlp, tuple) else mlp
        self._mlp_norm = None if output_norms is None else output_norms[1]
        self._call = _Layer(
            width=self.width,
            **{f"{name}_norm": norm.scale.data_ptr() for name, norm in norms.items()},
            **{f"{name}_epsilon": norm.epsilon for name, norm in norms.items()},
            **{name: weight.address for name, weight in zip(_WEIGHTS, weights, strict=False)},
            num_query_heads=self.num_query_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=head_dim,
            sinks=None if sinks is None else sinks.data_ptr(),
            window=window or 0,
            scale=scale,
            softcap=softcap or 0.0,
        )
        self._is_bf16 = IS_BF16[self.dtype]
        self._run = require_library().layer

    def run(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        attention: PagedAttention,
        kept: torch.Tensor | None = None,
        decoding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute rows, whose keys and values are written into the cache first.

        Args:
            x: ``[rows, width]``, of the weights' type.
            cos: ``[rows, rotary dim]``, likewise.
            sin: likewise.
            keys: the layer's cache, ``[blocks, block size, kv heads, head dim]``, likewise.
            values: likewise.
            slots: int64 ``[rows]``: where the rows' keys and values go, no two alike. The caller answers for it that the
                cache has them.
            attention: over the batch; of the rows that are kept.
            kept: int64, ascending: the rows whose results are wanted, and not only their keys and values; None: all. The
                caller answers for what it holds.
            decoding: int64, ascending: of all rows, those at which an answer goes on, the last of a prompt and drafts among
                them; None: there are none. With integers of 4 bits, their sums may be added in an order of their own, and
                the weights they are multiplied by not rounded. The caller answers for what it holds.

        Returns:
            ``[rows, width]``, of the rows that are kept.

        Raises:
            ValueError: a tensor is not as above; nothing is written.
        """
        dtype, rows, cache_shape, cos_shape = self.dtype, len(slots), keys.shape, cos.shape
        tensors = (x, cos, sin, keys, values)
        if (
            x.shape != (rows, self.width)
            or slots.shape != (rows,)
            or len(cos_shape) != 2
            or cos_shape[0] != rows
            or cos_shape[1] % 2
            or cos_shape[1] > self.head_dim
            or sin.shape != cos_shape
            or cache_shape[1:] != (attention.block_size, self.num_kv_heads, self.head_dim)
            or values.shape != cache_shape
            or slots.dtype != torch.int64
            or not all(tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous() for tensor in tensors)
            or not (slots.is_cpu and slots.is_contiguous())
            or (kept is None and attention.num_rows != rows)
        ):
            self._check(x, cos, sin, keys, values, slots, attention, kept)
        if kept is not None:
            check_tensor("kept", kept, [attention.num_rows], [torch.int64])
        if decoding is not None:
            check_tensor("decoding", decoding, [None], [torch.int64])
        out = x.new_empty(attention.num_rows, self.width)
        call = _Layer.from_buffer_copy(self._call)
        call.x, call.out, call.rows = x.data_ptr(), out.data_ptr(), rows
        call.cos, call.sin, call.rotary_dim = cos.data_ptr(), sin.data_ptr(), cos_shape[1]
        call.keys, call.values, call.slots = keys.data_ptr(), values.data_ptr(), slots.data_ptr()
        call.attention, call.kept = attention.address, None if kept is None else kept.data_ptr()
        if decoding is not None:
            call.decoding, call.num_decoding = decoding.data_ptr(), len(decoding)
        if self._mlp is None:
            self._run(ctypes.addressof(call), self._is_bf16)
            return out
        normed = torch.empty_like(out)
        call.normed = normed.data_ptr()
        self._run(ctypes.addressof(call), self._is_bf16)
        given = self._mlp(normed)
        if self._mlp_norm is not None:
            given = rms_norm(given, self._mlp_norm.scale, self._mlp_norm.epsilon)
        return out.add_(given)

    def _check(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        attention: PagedAttention,
        kept: torch.Tensor | None,
    ) -> None:
        rows = attention.num_rows if kept is None else len(slots)
        cache = [None, attention.block_size, self.num_kv_heads, self.head_dim]
        check_tensor("x", x, [rows, self.width], [self.dtype])
        check_tensor("cos", cos, [rows, None], [self.dtype])
        check_tensor("sin", sin, [rows, cos.shape[1]], [self.dtype])
        check_tensor("keys", keys, cache, [self.dtype])
        check_tensor("values", values, [keys.shape[0], *cache[1:]], [self.dtype])
        check_tensor("slots", slots, [rows], [torch.int64])
        if cos.shape[1] > self.head_dim or cos.shape[1] % 2:
            raise ValueError(f"cos: expected an even number of dimensions up to {self.head_dim}, got {list(cos.shape)}")
