"""`torch.compile` of a model's decoder layers, once for all layers of a class.

What a decoder layer does besides matrix products and attention is many short element-wise kernels: norms, rotations, gates,
residuals. Compiled, they become a few. Only the layers are compiled, not the model (torch calls it regional compilation):
equal layers then share what was compiled, and 32 take no longer to start than one. Sizes are dynamic, so that there is one
compilation for a single token and one for all other batches; CUDA graphs stay the business of `decode_graphs`.

To the compiler, attention is one opaque operator, `attend_opaquely`, and so is a packed linear layer. That leaves each layer
in one piece. With a graph break at attention it fell into four, and SmolLM2-135M decoded 16 to 24 % slower on a CPU than
uncompiled.

In one piece it pays no more there: decoding took 3 to 9 % longer, computing prompts between 4 % less and 3 % more, and the
start 8 to 15 s (one core of an AMD EPYC, float32, processor time). On a GPU it has not been measured yet; `radixkv bench
decode` does. So nothing is compiled unless asked for.

torch keeps eight compilations of a class of layers. gemma3n and gemma4, whose layers hand each other keys in a dictionary,
have more kinds than that, and run the others uncompiled; experts that ask for values break the graph (jetmoe).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn

from radixkv.attention import AttentionOptions

# Attends one layer: its index, query, key and value as `AttentionBatch.attend` takes them, and its options.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, AttentionOptions], torch.Tensor]

_BACKEND = "inductor"

_attend_of_batch: ContextVar[Attend] = ContextVar("attend_of_batch")


@contextmanager
def attention_of_compiled_layers(attend: Attend) -> Iterator[None]:
    """While a batch runs, ``attend`` is what `attend_opaquely` calls."""
    token = _attend_of_batch.set(attend)
    try:
        yield
    finally:
        _attend_of_batch.reset(token)


@torch.library.custom_op("radixkv::attend", mutates_args=())
def attend_opaquely(
    layer_idx: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The running batch's attention, as an operator that a compiler does not look into.

    It writes into the pool, of which the compiler knows nothing: whoever reads a key there was given this one's output.

    Args:
        layer_idx: a number in a tensor on the CPU: a plain number would be compiled in, and each layer by itself.
    """
    options = AttentionOptions(scale, softcap, sliding_window, sinks)
    return _attend_of_batch.get()(int(layer_idx), query, key, value, options).contiguous()


@attend_opaquely.register_fake
def _(
    layer_idx: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: Any
) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def compile_layers(model: nn.Module) -> None:
    """Have a model's decoder layers compiled when they are next called."""
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.radixkv_layer_idx = torch.tensor(module.layer_idx, device="cpu")
    compiled: dict[type[nn.Module], Callable[..., Any]] = {}
    for layer in decoder_layers(model):
        kind = type(layer)
        if kind not in compiled:
            compiled[kind] = torch.compile(_function_of_its_own(), dynamic=True, backend=_BACKEND)
        # Where `nn.Module.compile` puts it: `forward`, hooks and copies of the model stay what they are.
        layer._compiled_call_impl = partial(compiled[kind], layer)


def run_layers_as_they_are(model: nn.Module) -> None:
    """Undo `compile_layers`."""
    for layer in decoder_layers(model):
        layer._compiled_call_impl = None


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The members of the model's lists of layers that have an attention layer in them."""
    found: dict[nn.Module, None] = {}
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            found |= {layer: None for layer in module if any(hasattr(part, "layer_idx") for part in layer.modules())}
    inner = {part for layer in found for part in layer.modules() if part is not layer}
    return [layer for layer in found if layer not in inner]


def _run_layer(layer: nn.Module, *args: Any, **options: Any) -> Any:
    return layer._call_impl(*args, **options)


def _function_of_its_own() -> Callable[..., Any]:
    """`_run_layer` with another code object.

    torch keeps what it compiled by code object, eight times at most. Models and classes of layers should not share those.
    """
    return types.FunctionType(_run_layer.__code__.replace(), _run_layer.__globals__)
