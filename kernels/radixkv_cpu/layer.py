"""The parts of a decoder layer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

import torch

from radixkv_cpu.checks import check_scores, check_tensor
from radixkv_cpu.elementwise import rms_norm
from radixkv_cpu.fields import floats, pointers, sizes
from radixkv_cpu.linear import Weight

_NORMS = ("input", "post", "query", "key", "attention", "mlp")
_WEIGHTS = ("project", "project_back", "gate_up", "down")


class LayerStruct(ctypes.Structure):
    """`Layer` of ``src/calls.h``."""

    _fields_ = (
        *sizes("width"),
        *pointers(*(f"{name}_norm" for name in _NORMS)),
        *floats(*(f"{name}_epsilon" for name in _NORMS)),
        *pointers(*_WEIGHTS),
        *sizes("num_query_heads", "num_kv_heads", "head_dim"),
        *pointers("keys", "values", "sinks"),
        *sizes("window"),
        *floats("scale", "softcap"),
    )


class RMSNorm(Protocol):
    """An RMS norm."""

    @property
    def scale(self) -> torch.Tensor:
        """float32 ``[dim]``, by which a normalised vector is multiplied."""

    @property
    def epsilon(self) -> float:
        """Added to the mean square."""


class DecoderLayer:
    """``x += attention(norm(x)); x += mlp(norm(x))`` over paged keys and values, which `DecoderLayers` runs.

    The scales of norms are read once, when the layer is made.

    Args:
        input_norm: before attention, ``[width]``.
        post_norm: before the MLP, ``[width]``.
        head_norms: of queries and of keys, ``[head dim]``; None: they are not normed.
        project: to query, key and value, stacked.
        project_back: the projection of attention's output.
        mlp: a gated weight and the one back to the layer's width; or a function of normed rows that computes an MLP of
            another kind.
        head_dim: of queries, keys and values.
        output_norms: of the outputs of attention and of the MLP, before they are added, ``[width]``; None: they are not
            normed.
        scale: scores are multiplied by it.
        softcap: as `PagedAttention.attend` takes it.
        window: likewise.
        sinks: likewise.

    Attributes:
        dtype: of weights, rows and cache.
        width: of a row.
        num_kv_heads: of the cache.
        struct: the library's arguments, except for the cache.

    Raises:
        ValueError: the parts do not belong together, or an argument is not as above.
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
        given = [(weight.dtype, weight.in_features, weight.out_features, weight.is_gated) for weight in weights]
        expected = [
            (self.dtype, self.width, (self.num_query_heads + 2 * self.num_kv_heads) * head_dim, False),
            (self.dtype, self.num_query_heads * head_dim, self.width, False),
        ]
        if gated:
            inner = gated[1].in_features
            expected += [(self.dtype, self.width, inner, True), (self.dtype, inner, self.width, False)]
        if given != expected or not self.num_kv_heads or self.num_query_heads % self.num_kv_heads:
            raise ValueError(
                f"weights: expected a layer with heads of {head_dim}, got (type, inputs, outputs, whether gated) {given}"
            )
        all_norms = (input_norm, post_norm, *(head_norms or (None, None)), *(output_norms or (None, None)))
        norms = {name: norm for name, norm in zip(_NORMS, all_norms, strict=True) if norm is not None}
        # Taken once and kept: a norm may compute its scale at each access, or be given another.
        scales = {name: norm.scale for name, norm in norms.items()}
        for name, norm_scale in scales.items():
            check_tensor(
                f"{name}_norm", norm_scale, [head_dim if name in ("query", "key") else self.width], [torch.float32]
            )
        check_scores(window, softcap)
        if sinks is not None:
            check_tensor("sinks", sinks, [self.num_query_heads], [torch.float32])
        self._kept = weights, scales, sinks  # the library reads them at every call
        self._mlp = None if isinstance(mlp, tuple) else mlp
        self._mlp_norm = None if output_norms is None else (scales["mlp"], output_norms[1].epsilon)
        self.struct = LayerStruct(
            width=self.width,
            **{f"{name}_norm": norm_scale.data_ptr() for name, norm_scale in scales.items()},
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

    @property
    def is_whole(self) -> bool:
        """Whether the library computes the MLP, too."""
        return self._mlp is None

    def add_mlp(self, rows: torch.Tensor, normed: torch.Tensor) -> None:
        """Add the output of an MLP of another kind for normed rows, in place. Where the layer is whole, the library has."""
        if self._mlp is None:
            return
        given = self._mlp(normed)
        if self._mlp_norm is not None:
            given = rms_norm(given, *self._mlp_norm)
        rows.add_(given)
