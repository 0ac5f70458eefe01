"""Finds the modules of a model that native code can replace, and replaces those for which it gives the same results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from radixkv.model.compute_target import ComputeTarget
from radixkv.model.native import attention, experts, layer, mlp, norm
from radixkv.model.native.attention import NativeSelfAttention
from radixkv.model.native.embedding import native_embedding
from radixkv.model.native.experts import NativeExperts
from radixkv.model.native.functional_weight import replace_functional_weights
from radixkv.model.native.layer import native_layer
from radixkv.model.native.linear import NativeLinear, is_replaceable
from radixkv.model.native.mlp import NativeGatedMLP
from radixkv.model.native.norm import native_norms
from radixkv.model.native.weights import BlockKeeper, WeightKeeper
from radixkv.model.replacement.equivalence import error_in_tolerances
from radixkv.model.replacement.packed_linear import pack_linears
from radixkv.model.replacement.probe import Probe, compute_a_few_tokens, probe_attention, record_calls
from radixkv.model.replacement.replace_modules import is_unchanged
from radixkv.model.weights.deferred import DeferredWeights, ProductsOfZeros
from radixkv.model.weights.mapped import MappedWeights
from radixkv_cpu import is_packable

# Possible replacements of a module, with its weights as they are or as they are to be kept.
_Make = Callable[[nn.Module, WeightKeeper | None], Sequence[nn.Module]]


def prepare_for_cpu(
    model: transformers.PreTrainedModel,
    native: bool = True,
    keeper: WeightKeeper | None = None,
    deferred: DeferredWeights | None = None,
) -> None:
    """Replace what can be replaced; the linear layers that are left are packed for torch's own matrix kernels.

    Args:
        model: on the CPU. Its attention must be set afterwards.
        native: whether native code may stand in for modules.
        keeper: of the weights of replaced layers; None: they stay as they are.
        deferred: the model's weights, where they are not in memory; afterwards those that are not packed are.
    """
    is_native = ComputeTarget(model.device, model.dtype, native).native_unsupported_reason is None
    with torch.inference_mode(), probe_attention(model) as probe:
        if is_native:
            weights = deferred or MappedWeights(model)
            # What modules are called with does not depend on weights.
            with ProductsOfZeros():
                record_calls(model, probe)
            # The largest matrix first, while nothing else is packed.
            _replace_head(model, keeper, weights)
            replace = partial(_replace, model, probe, weights)
            # In bfloat16 a large weight and the weight plus one may differ by less than rounding: the closest norm is right.
            replace(norm.is_candidate, lambda module, _: native_norms(module))
            replace(mlp.is_candidate, lambda *given: [NativeGatedMLP(*given)], keeper)
            replace(experts.is_candidate, lambda *given: [NativeExperts(*given)], keeper)
            # Then attention, whose heads may be normed, and layers, which are made of all these.
            replace(
                lambda module: attention.is_candidate(module) and module.layer_idx in probe.options,
                lambda module, *given: [NativeSelfAttention(module, probe.options[module.layer_idx], *given)],
                keeper,
            )
            replace(layer.is_candidate, lambda module, _: [native_layer(module)])
            _replace_linears(model, probe, keeper, weights)
        if deferred is not None:
            deferred.fill(model)
        if is_native:
            replace_functional_weights(model)
        pack_linears(model, lambda: compute_a_few_tokens(model))


def _replace(
    model: nn.Module,
    probe: Probe,
    weights: DeferredWeights | MappedWeights,
    is_candidate: Callable[[nn.Module], bool],
    make: _Make,
    keeper: WeightKeeper | None = None,
) -> None:
    """Replace modules by ones that give the same results for random input.

    Args:
        probe: in progress, with recorded calls of the modules that may be replaced.
        weights: the model's.
        is_candidate: whether a module, whose weights may not be in memory, has the parts that ``make`` needs.
        make: possible replacements of a candidate. They are compared with the weights as they are: a pattern that fits
            computes the same with any weights.
        keeper: of the replacement's weights.
    """
    for _, parent, name, child in _children(model):
        if child not in probe.calls or not is_candidate(child):
            continue
        with weights.filled(child):
            candidates = make(child, None)
            errors = [error_in_tolerances(candidate, child, probe) for candidate in candidates]
            if min(errors) <= 1:
                best = errors.index(min(errors))
                setattr(parent, name, candidates[best] if keeper is None else make(child, keeper)[best])


def _replace_head(
    model: transformers.PreTrainedModel, keeper: WeightKeeper | None, weights: DeferredWeights | MappedWeights
) -> None:
    """Replace the output head, and the embedding if its weights are kept there, or in blocks of its own."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    table = getattr(embedding, "weight", None)
    kept = None
    if isinstance(head, nn.Linear) and is_replaceable(head):
        with _named("output head"), weights.filled(head):
            replacement = NativeLinear(head, keeper and keeper.for_head())
        model.set_output_embeddings(replacement)
        kept = replacement.packed if table is head.weight else None
    if kept is None and isinstance(keeper, BlockKeeper) and isinstance(table, nn.Parameter):
        kept = keeper.weight([table], (), None)
    in_place = native_embedding(embedding, kept)
    if in_place is not None:
        model.set_input_embeddings(in_place)


def _replace_linears(
    model: transformers.PreTrainedModel,
    probe: Probe,
    keeper: WeightKeeper | None,
    weights: DeferredWeights | MappedWeights,
) -> None:
    """Replace the linear layers outside of replaced modules.

    A module that was called without calling its linear layer reads the weight itself, which a replacement does not have.
    """
    for path, parent, name, child in _children(model):
        if child not in probe.calls and parent in probe.calls:
            continue
        if isinstance(child, nn.Linear) and is_replaceable(child):
            with _named(path), weights.filled(child):
                setattr(parent, name, NativeLinear(child, keeper))
        elif type(child) is Conv1D and is_unchanged(child) and is_packable(child.get_parameter("weight").mT):
            with _named(path), weights.filled(child):
                setattr(parent, name, NativeLinear(_as_linear(child), keeper))


def _as_linear(module: Conv1D) -> nn.Linear:
    """The same product as an `nn.Linear`, which has its weight transposed."""
    weight = module.get_parameter("weight")
    num_inputs, num_features = weight.shape
    linear = nn.Linear(num_inputs, num_features, device="meta")
    linear.weight = nn.Parameter(weight.mT.contiguous(), requires_grad=False)
    linear.bias = module.get_parameter("bias")
    return linear


@contextmanager
def _named(layer: str) -> Iterator[None]:
    """Let a ValueError name the linear layer, as when weights that are to be quantised are not finite."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{layer}: {error}") from error


def _children(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """Every module with its name in the model, its parent and its name there, as the model is when this begins."""
    yield from [
        (f"{prefix}.{name}".removeprefix("."), parent, name, child)
        for prefix, parent in model.named_modules()
        for name, child in parent.named_children()
    ]
