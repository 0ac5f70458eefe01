"""Tests whether one module gives the same results as another for random input, so that it can stand in for it.

What a module computes is not known from its class or its parameters' names. So a replacement that was made for a known
pattern is compared with the original, on input of every size, at positions far apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import nn

from radixkv.model.attention_function import OPTIONS, attention_by, obstacle
from radixkv.model.layer_probe import see_itself, see_nothing
from radixkv.model.own_errors import errors_of_model
from radixkv.model.positions.window_mask import window_of
from radixkv.model.replacement.replace_modules import is_unchanged
from radixkv.model.replacement.watched_calls import watched_calls

# How large the norm of a token's difference from the original's result may be, relative to the norm of that result.
TOLERANCES = MappingProxyType({torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2})
# How much larger or smaller a result, or what it adds to its input, may be on average. Rounding has no direction; a factor
# that the replacement lacks has, even one so near 1 that it is lost in what bfloat16 rounds.
_MAX_FACTOR = 1.5e-2
# How large a probe's tokens are. In the small ones a norm's epsilon shows, in the large ones that something is clipped.
_PROBE_SIZES = (1e-3, 0.1, 1.0, 4.0, 16.0)
# Random numbers around 0 would hide that a module subtracts their mean.
_PROBE_MEAN = 0.5


@dataclass(slots=True)
class Probe:
    """What a model's modules were seen to do within `probe_attention`.

    Attributes:
        options: those of `OPTIONS` that each layer, by its index, gives its attention function; not of layers that give it
            more, see `obstacle`.
        attended: the queries, and the keys, of each call of the attention function, ``[1, heads, tokens, dim]``.
        calls: the arguments that each module was last called with, see `record_calls`.
    """

    options: dict[int, dict[str, Any]] = field(default_factory=dict)
    attended: list[torch.Tensor] = field(default_factory=list)
    calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)


@contextmanager
def probe_attention(model: transformers.PreTrainedModel) -> Iterator[Probe]:
    """Within, each token sees only itself, as it was rotated: real attention could hide how a few tokens were rotated.

    Where a layer has an `obstacle`, they see nothing: `watch_layers` will refuse the model.
    """
    found = Probe()

    def probe(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **given: Any,
    ) -> torch.Tensor:
        found.attended.extend((query, key))
        if obstacle(module, query, key, attention_mask, given) is not None:
            return see_nothing(query, value)
        layer_idx: Any = module.layer_idx
        given["sliding_window"] = window_of(given.get("sliding_window"), attention_mask)
        found.options[layer_idx] = {name: given[name] for name in OPTIONS if given.get(name) is not None}
        return see_itself(query, key, value)

    with attention_by(model, probe):
        yield found


def record_calls(model: transformers.PreTrainedModel, probe: Probe) -> None:
    """Let a model compute a few tokens, and record the calls of those modules whose methods were not changed."""

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        probe.calls[module] = args, kwargs

    with watched_calls([module for module in model.modules() if is_unchanged(module)], record):
        compute_a_few_tokens(model)


def compute_a_few_tokens(model: transformers.PreTrainedModel) -> None:
    """Let a model compute tokens whose positions are as far apart as they can be.

    Raises:
        UnsupportedModelError: its own code fails.
    """
    count = len(_PROBE_SIZES)
    tokens = torch.arange(1, count + 1, device=model.device).unsqueeze(0)
    # As far apart as they can be: rotation makes a difference, and some models scale queries at far positions only.
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**12
    with errors_of_model(model):
        model(input_ids=tokens, position_ids=tokens * ((longest - 1) // count), use_cache=False)


def error_in_tolerances(replacement: nn.Module, original: nn.Module, probe: Probe) -> float:
    """How far the replacement's results are from the original's for random input, in tolerances.

    Args:
        probe: active, with a recorded call of the original.
    """
    args, kwargs = probe.calls[original]
    x = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(x, torch.Tensor) or x.dtype not in TOLERANCES:
        return math.inf
    tokens = _random_tokens(x)
    if args:
        args = (tokens, *args[1:])
    else:
        kwargs = {**kwargs, "hidden_states": tokens}
    expected, expected_attended = _run(original, args, kwargs, probe)
    try:
        given, attended = _run(replacement, args, kwargs, probe)
    # The original is called in a way that the pattern does not know, or its parts do not fit together in that way.
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return math.inf
    if [heads.shape for heads in attended] != [heads.shape for heads in expected_attended]:
        return math.inf
    if isinstance(given, tuple):
        if not isinstance(expected, tuple) or len(expected) != len(given):
            return math.inf
        given, expected = given[0], expected[0]
    if isinstance(expected, tuple) or given.shape != expected.shape or given.dtype != expected.dtype:
        return math.inf
    factors = [_share(given.double() - expected.double(), expected.double())]
    if expected.shape == tokens.shape:  # what a layer adds
        factors.append(_share(given.double() - expected.double(), expected.double() - tokens.double()))
    # A factor of queries at some positions makes little difference to the result: less than rounding may.
    factors += [_largest_share(heads - own, own) for heads, own in zip(attended, expected_attended, strict=True)]
    return max(_largest_difference(given, expected), *(factor / _MAX_FACTOR for factor in factors))


def _random_tokens(like: torch.Tensor) -> torch.Tensor:
    """Random input of this shape, type and device, in which a token is of one of the sizes in turn."""
    numbers = torch.randn(like.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32) + _PROBE_MEAN
    sizes = (
        torch.tensor(_PROBE_SIZES, dtype=torch.float32)
        .repeat(like.numel())[: like.numel() // like.shape[-1]]
        .view(*like.shape[:-1], 1)
    )
    return (numbers * sizes).to(like.device, like.dtype)


def _run(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], probe: Probe
) -> tuple[Any, list[torch.Tensor]]:
    """What a module returns, and the queries and keys that it attends with."""
    probe.attended.clear()
    returned = module(*args, **kwargs)
    return returned, [*probe.attended]


def _largest_difference(given: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest norm of a token's difference relative to the norm that is expected, in tolerances."""
    difference, length = (y.float().norm(dim=-1) for y in (given.float() - expected.float(), expected))
    return float((difference / (TOLERANCES[given.dtype] * length)).nan_to_num(math.inf).max())


def _largest_share(part: torch.Tensor, whole: torch.Tensor) -> float:
    """The largest `_share` of a token; both are ``[1, heads, tokens, dim]``."""
    products = ((each.double() * whole.double()).sum((1, 3)) for each in (part, whole))
    return float(torch.div(*products).abs().max())


def _share(part: torch.Tensor, whole: torch.Tensor) -> float:
    """By which factor of ``whole`` a ``part`` is along it, in size."""
    return abs(float((part * whole).sum() / (whole * whole).sum()))
