"""Tests whether one module gives the same results as another for random input, so that it can stand in for it.

What a module computes is not known from its class or its parameters' names. So a replacement that was made for a known
pattern is compared with the original, on input of every size, at positions far apart.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from radixkv.model.replacement.probe import TOKEN_SIZES, Probe

# How large the norm of a token's difference from the original's result may be, relative to the norm of that result.
_TOLERANCES = MappingProxyType({torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2})
# How much larger or smaller a result, or what it adds to its input, may be on average. Rounding has no direction; a factor
# that the replacement lacks has, even one so near 1 that it is lost in what bfloat16 rounds.
_MAX_FACTOR = 1.5e-2
# Random numbers around 0 would hide that a module subtracts their mean.
_MEAN = 0.5


def error_in_tolerances(replacement: nn.Module, original: nn.Module, probe: Probe) -> float:
    """How far the replacement's results are from the original's for random input, in tolerances.

    Args:
        probe: active, with a recorded call of the original.
    """
    args, kwargs = probe.calls[original]
    x = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(x, torch.Tensor) or x.dtype not in _TOLERANCES:
        return math.inf
    tokens = _random_tokens(x)
    if args:
        args = (tokens, *args[1:])
    else:
        kwargs = {**kwargs, "hidden_states": tokens}
    expected, expected_attended = _run(original, args, kwargs, probe)
    try:
        given, attended = _run(replacement, args, kwargs, probe)
    # The original is called in a way that the pattern does not support, or its parts do not fit together in that way.
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
    wanted = expected.double().flatten()
    difference = given.double().flatten() - wanted
    factors = [float(_share(difference, wanted))]
    if expected.shape == tokens.shape:  # what a layer adds
        factors.append(float(_share(difference, wanted - tokens.double().flatten())))
    # A factor of queries at some positions makes little difference to the result: less than rounding may.
    factors += [_largest_share(heads - own, own) for heads, own in zip(attended, expected_attended, strict=True)]
    return max(_largest_difference(given, expected), *(factor / _MAX_FACTOR for factor in factors))


def _random_tokens(like: torch.Tensor) -> torch.Tensor:
    """Random input of this shape, type and device, in which a token is of one of the sizes in turn."""
    numbers = torch.randn(like.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32) + _MEAN
    sizes = (
        torch.tensor(TOKEN_SIZES, dtype=torch.float32)
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
    return float((difference / (_TOLERANCES[given.dtype] * length)).nan_to_num(math.inf).max())


def _largest_share(part: torch.Tensor, whole: torch.Tensor) -> float:
    """The largest `_share` of a token; both are ``[1, heads, tokens, dim]``."""
    part, whole = (each.double().transpose(1, 2).flatten(2) for each in (part, whole))
    return float(_share(part, whole).max())


def _share(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """By which factor of ``whole`` a ``part`` is along it, in size, over the last dimension.

    Zeros have no part; numbers that are not finite, which compare with nothing, an infinite one.
    """
    length = (whole * whole).sum(-1)
    share = (part * whole).sum(-1) / length
    return torch.where(length == 0, 0.0, share).abs().nan_to_num(math.inf)
