"""Finds the modules of a model that compiled code can stand in for, and replaces those that it gives the same results as."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AttentionInterface

from radixkv.model.native.attention import OPTIONS, NativeSelfAttention, is_candidate
from radixkv.model.native.embedding import native_embedding
from radixkv.model.native.layer import native_layers
from radixkv.model.native.linear import NativeLinear, is_replaceable
from radixkv.model.native.mlp import native_mlps
from radixkv.model.native.norm import native_norms
from radixkv.model.native.weights import Quantiser
from radixkv.model.packed_linear import pack_linears
from radixkv.model.shared_input import is_unchanged
from radixkv_cpu import library

# What could stand in for a module, with weights as they are or quantised.
_Make = Callable[[nn.Module, Quantiser | None], Sequence[nn.Module]]

_PROBE_NAME = "radixkv_probe"
# The length of the difference to what the original gives for a token, relative to the length of that.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
# How large a probe's tokens are. In the small ones a norm's epsilon shows, in the large ones that something is clipped.
_PROBE_SIZES = (1e-3, 0.1, 1.0, 4.0, 16.0)
# Random numbers around 0 would hide it if their mean is subtracted.
_PROBE_MEAN = 0.5


@dataclass(slots=True)
class _Call:
    """What a module was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


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
    with torch.inference_mode(), _probe_attention(model, options):
        if native and library() is not None and model.dtype in _TOLERANCES:
            calls = _record_calls(model)
            # In bfloat16 a large weight and one more differ by less than roundings may: the closest norm is right.
            _replace(model, calls, lambda module, _: native_norms(module), None)
            _replace(model, calls, native_mlps, quantiser)
            # Then attention, whose heads may be normed, and layers, which are made of all these.
            _replace(model, calls, make_attention, quantiser)
            _replace(model, calls, lambda module, _: native_layers(module), None)
            _replace_linears(model, quantiser)
        pack_linears(model, lambda: _compute_a_few_tokens(model))


def _replace(model: nn.Module, calls: dict[nn.Module, _Call], make: _Make, quantiser: Quantiser | None) -> None:
    """Replace modules by what gives the same for random input.

    Args:
        calls: of the modules that may be replaced.
        make: what could stand in for a module. What is compared is not quantised: a pattern that fits computes the same with
            other weights.
    """
    for parent, name, child in _children(model):
        if child not in calls:
            continue
        candidates = make(child, None)
        errors = [_error(candidate, child, calls[child]) for candidate in candidates]
        if errors and min(errors) <= 1:
            best = errors.index(min(errors))
            setattr(parent, name, candidates[best] if quantiser is None else make(child, quantiser)[best])


def _replace_linears(model: transformers.PreTrainedModel, quantiser: Quantiser | None) -> None:
    """Replace the linear layers that are not parts of what has been replaced, and an embedding tied to the head."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = isinstance(head, nn.Linear) and getattr(embedding, "weight", None) is head.weight
    for parent, name, child in _children(model):
        if isinstance(child, nn.Linear) and is_replaceable(child):
            setattr(
                parent, name, NativeLinear(child, quantiser and (quantiser.for_head() if child is head else quantiser))
            )
    if tied:
        replacement = native_embedding(embedding, model.get_output_embeddings())
        if replacement is not None:
            model.set_input_embeddings(replacement)


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Every module with its parent and its name there, as the model is when this begins."""
    yield from [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]


def _record_calls(model: transformers.PreTrainedModel) -> dict[nn.Module, _Call]:
    """The last call of each module, of those that nobody changed, when the model computes a few tokens."""
    calls: dict[nn.Module, _Call] = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls[module] = _Call(args, kwargs)

    hooks = [m.register_forward_hook(record, with_kwargs=True) for m in [*model.modules()] if is_unchanged(m)]
    try:
        _compute_a_few_tokens(model)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _compute_a_few_tokens(model: transformers.PreTrainedModel) -> None:
    count = len(_PROBE_SIZES)
    tokens = torch.arange(1, count + 1).unsqueeze(0)
    # As far apart as they can be: turning makes a difference, and some models scale queries at far positions only.
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**12
    model(input_ids=tokens, position_ids=tokens * ((longest - 1) // count), use_cache=False)


def _error(replacement: nn.Module, original: nn.Module, call: _Call) -> float:
    """How far the replacement is from giving what the original gives for random input, in tolerances."""
    args, kwargs = call.args, dict(call.kwargs)
    x = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(x, torch.Tensor) or x.dtype not in _TOLERANCES:
        return math.inf
    numbers = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)) + _PROBE_MEAN
    sizes = torch.tensor(_PROBE_SIZES).repeat(x.numel())[: x.numel() // x.shape[-1]].view(*x.shape[:-1], 1)
    probe = (numbers * sizes).to(x.dtype)
    if args:
        args = (probe, *args[1:])
    else:
        kwargs["hidden_states"] = probe
    expected = original(*args, **kwargs)
    try:
        given = replacement(*args, **kwargs)
    except (TypeError, ValueError, AttributeError):  # the original is called in a way that the pattern does not know
        return math.inf
    if isinstance(given, tuple):
        if not isinstance(expected, tuple) or len(expected) != len(given):
            return math.inf
        given, expected = given[0], expected[0]
    if isinstance(expected, tuple) or given.shape != expected.shape or given.dtype != expected.dtype:
        return math.inf
    difference, length = (y.float().norm(dim=-1) for y in (given.float() - expected.float(), expected))
    error = (difference / (_TOLERANCES[given.dtype] * length)).nan_to_num(math.inf).max()
    return float(error)


@contextmanager
def _probe_attention(model: transformers.PreTrainedModel, options: dict[int, dict[str, Any]]) -> Iterator[None]:
    """Replace attention, in which a few tokens' positions could drown: each token sees itself, by how it was turned.

    Args:
        options: gets what each layer, by its index, tells its attention function.
    """

    def probe(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any, **given: Any
    ) -> tuple[torch.Tensor, None]:
        layer_idx: Any = module.layer_idx
        options[layer_idx] = {name: given[name] for name in OPTIONS if given.get(name) is not None}
        group = query.shape[1] // key.shape[1]
        # Not the product of query and key: at equal positions it is the same, however both were turned.
        ramp = torch.linspace(-1, 1, query.shape[-1])
        scores = (query.float() * ramp + key.float().repeat_interleave(group, dim=1) * ramp**2).mean(-1, keepdim=True)
        output = value.repeat_interleave(group, dim=1) * (1 + torch.tanh(scores)).to(value.dtype)
        return output.transpose(1, 2).contiguous(), None

    implementation = model.config._attn_implementation
    AttentionInterface.register(_PROBE_NAME, probe)
    model.set_attn_implementation(_PROBE_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)
