"""`torch.compile` of a model's decoder layers, one compilation per class of layers.

Besides matrix products and attention, a decoder layer runs many short element-wise kernels: norms, rotations, gates,
residuals. Compilation fuses them into a few. Only the layers are compiled, not the model (regional compilation in torch):
equal layers share the compiled code, and 32 take no longer to start than one. Sizes are dynamic, so that there is one
compilation for a single token and one for all other batches; CUDA graphs are captured by `decode_graphs`.

To the compiler, attention is one opaque operator, `opaque_attention`, and so is a packed linear layer. So each layer is
one graph; with a graph break at attention it would be four.

On a CPU that makes a model no faster (docs/benchmarks/cpu.md has the figures), so it is off by default there. On a GPU it is
on: some 30 element-wise kernels a layer, 46 in Qwen3, become a few. Together with merged linear layers and rotation by the
kernel that stores keys, this took 18 to 27 % off a step on an H200 (docs/benchmarks/gpu.md). What each gains alone has not
been measured yet; `radixkv bench decode` does.

torch keeps eight compilations per class of layers. gemma3n and gemma4, whose layers pass keys to each other in a dictionary,
need more variants than that, and run the others uncompiled; experts that read values on the host break the graph (jetmoe).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from radixkv.attention import NewTokens
from radixkv.model.forward_pass import running

_BACKEND = "inductor"


@torch.library.custom_op("radixkv::attend", mutates_args=())
def opaque_attention(
    layer_idx: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cosines: torch.Tensor | None,
    sines: torch.Tensor | None,
) -> torch.Tensor:
    """The running batch's attention, as an operator that the compiler does not trace.

    It writes into the pool, which is not declared to the compiler: later reads of a key there depend on this output.

    Args:
        layer_idx: a tensor on the CPU with one number: a plain number would be a constant, with one compilation per layer.
    """
    rotary = None if cosines is None or sines is None else (cosines, sines)
    return running.get().attend(int(layer_idx), NewTokens(query, key, value, rotary)).contiguous()


@opaque_attention.register_fake
def _(
    layer_idx: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rotary: Any
) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def compile_layers(model: nn.Module) -> None:
    """Set a model's decoder layers to be compiled at their next call."""
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.radixkv_layer_idx = torch.tensor(module.layer_idx, device="cpu")
    compiled: dict[type[nn.Module], Callable[..., Any]] = {}
    for layer in decoder_layers(model):
        layer_class = type(layer)
        if layer_class not in compiled:
            compiled[layer_class] = torch.compile(_copy_of_run_layer(), dynamic=True, backend=_BACKEND)
        # The attribute that `nn.Module.compile` sets: `forward`, hooks and copies of the model are unchanged.
        layer._compiled_call_impl = partial(compiled[layer_class], layer)


def uncompile_layers(model: nn.Module) -> None:
    """Undo `compile_layers`."""
    for layer in decoder_layers(model):
        layer._compiled_call_impl = None


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The members of the model's `nn.ModuleList`s that contain an attention layer; the outermost, where they nest."""
    found: dict[nn.Module, None] = {}
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            found |= {layer: None for layer in module if any(hasattr(part, "layer_idx") for part in layer.modules())}
    inner = {part for layer in found for part in layer.modules() if part is not layer}
    return [layer for layer in found if layer not in inner]


def _run_layer(layer: nn.Module, *args: Any, **options: Any) -> Any:
    return layer._call_impl(*args, **options)


def _copy_of_run_layer() -> Callable[..., Any]:
    """`_run_layer` with another code object.

    torch keeps at most eight compilations per code object. Models and classes of layers should not share those.
    """
    return types.FunctionType(_run_layer.__code__.replace(), _run_layer.__globals__)
