"""Finds the modules of a model that compiled code can stand in for, and replaces those that it gives the same results as."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import nn

from radixkv.model.mapped_weights import MappedWeights
from radixkv.model.native.attention import NativeSelfAttention, is_candidate
from radixkv.model.native.embedding import native_embedding
from radixkv.model.native.layer import native_layers
from radixkv.model.native.linear import NativeLinear, is_replaceable
from radixkv.model.native.mlp import native_mlps
from radixkv.model.native.norm import native_norms
from radixkv.model.native.weights import Quantiser
from radixkv.model.packed_linear import pack_linears
from radixkv.model.probing import TOLERANCES, Call, compute_a_few_tokens, error_of, probe_attention, record_calls
from radixkv_cpu import library

# What could stand in for a module, with weights as they are or quantised.
_Make = Callable[[nn.Module, Quantiser | None], Sequence[nn.Module]]


def prepare_for_cpu(
    model: transformers.PreTrainedModel, native: bool = True, quantiser: Quantiser | None = None
) -> None:
    """Replace what can be replaced; the linear layers that are left are packed for torch's own matrix kernels.

    Args:
        model: on the CPU. Its attention must be set afterwards.
        native: whether compiled code may stand in for modules.
        quantiser: of the weights of linear layers that compiled code stands in for; None: they stay as they are.
    """

    def make_attention(module: nn.Module, quantiser: Quantiser | None) -> list[nn.Module]:
        given = options.get(getattr(module, "layer_idx", None))
        return [NativeSelfAttention(module, given, quantiser)] if given is not None and is_candidate(module) else []

    options: dict[Any, dict[str, Any]] = {}
    with torch.inference_mode(), probe_attention(model, options):
        if native and library() is not None and model.dtype in TOLERANCES:
            mapped = MappedWeights(model)
            calls = record_calls(model)
            # In bfloat16 a large weight and one more differ by less than roundings may: the closest norm is right.
            _replace(model, calls, lambda module, _: native_norms(module), None, mapped)
            _replace(model, calls, native_mlps, quantiser, mapped)
            # Then attention, whose heads may be normed, and layers, which are made of all these.
            _replace(model, calls, make_attention, quantiser, mapped)
            _replace(model, calls, lambda module, _: native_layers(module), None, mapped)
            _replace_linears(model, quantiser, mapped)
        pack_linears(model, lambda: compute_a_few_tokens(model))


def _replace(
    model: nn.Module, calls: dict[nn.Module, Call], make: _Make, quantiser: Quantiser | None, mapped: MappedWeights
) -> None:
    """Replace modules by what gives the same for random input.

    Args:
        calls: of the modules that may be replaced.
        make: what could stand in for a module. What is compared is not quantised: a pattern that fits computes the same with
            other weights.
        mapped: whose pages are given back after each module.
    """
    for parent, name, child in _children(model):
        if child not in calls:
            continue
        candidates = make(child, None)
        errors = [error_of(candidate, child, calls[child]) for candidate in candidates]
        if errors and min(errors) <= 1:
            best = errors.index(min(errors))
            setattr(parent, name, candidates[best] if quantiser is None else make(child, quantiser)[best])
            mapped.release()


def _replace_linears(model: transformers.PreTrainedModel, quantiser: Quantiser | None, mapped: MappedWeights) -> None:
    """Replace the linear layers that are not parts of what has been replaced, and an embedding tied to the head."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = isinstance(head, nn.Linear) and getattr(embedding, "weight", None) is head.weight
    for parent, name, child in _children(model):
        if isinstance(child, nn.Linear) and is_replaceable(child):
            setattr(
                parent, name, NativeLinear(child, quantiser and (quantiser.for_head() if child is head else quantiser))
            )
            mapped.release()
    if tied:
        replacement = native_embedding(embedding, model.get_output_embeddings())
        if replacement is not None:
            model.set_input_embeddings(replacement)


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Every module with its parent and its name there, as the model is when this begins."""
    yield from [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
