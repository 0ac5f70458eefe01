"""The attention functions that a model calls: that of the engine, and one to find out what its layers pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface

from radixkv.attention import AttentionOptions, NewTokens, Rotary
from radixkv.model.forward_pass import running
from radixkv.model.graphs.compiled_layers import opaque_attention
from radixkv.model.positions.window_mask import is_masked, is_of_model, make_mask, watch_windows, window_of
from radixkv.model.silence import silence_transformers

# The names in transformers of the engine's attention function, and the one that `attention_by` gives.
ATTENTION_NAME = "radixkv"
_PROBE_NAME = "radixkv_probe"
OWN_NAMES = frozenset({ATTENTION_NAME, _PROBE_NAME})
# Arguments of an attention function that describe a layer, besides what changes with every batch.
OPTIONS = ("scaling", "softcap", "sliding_window", "s_aux")
# Tensors that it may be given besides: they do not change how a token attends to those before it.
_OF_NO_EFFECT = frozenset({"position_ids"})

# Each thread has its own: several models may be probed at the same time.
_attend: ContextVar[Callable[..., torch.Tensor]] = ContextVar("attend")


def layer_options(key_dim: int, given: Mapping[str, Any], mask: torch.Tensor | None = None) -> AttentionOptions:
    """A layer's options by what it gives an attention function beside heads of this size."""
    scale = given.get("scaling") or key_dim**-0.5
    window = window_of(given.get("sliding_window"), mask)
    return AttentionOptions(scale, given.get("softcap"), window, given.get("s_aux"))


def unsupported_reason(
    module: Any, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, given: Mapping[str, Any]
) -> str | None:
    """What of a call of an attention function cannot be done over blocks of keys and values; None: nothing.

    Args:
        module: that calls it.
        query: ``[batch, heads, tokens, dim]``.
        key: likewise, of as many tokens.
        mask: that it is given, by `make_mask` where transformers made it.
        given: the other arguments that it is given by name.
    """
    if query.shape[::2] != key.shape[::2]:
        return "its layers attend to something else than the tokens of the prompt (by cross-attention, say)"
    if False in (given.get("is_causal"), getattr(module, "is_causal", None)):
        is_encoder = getattr(getattr(module, "config", None), "is_decoder", None) is False
        hint = " (a configuration with is_decoder=True may not)" if is_encoder else ""
        return f"its layers attend to later tokens, too{hint}"
    added = ["a mask of their own"] if is_of_model(mask) else []
    added += [
        name
        for name, each in given.items()
        if isinstance(each, torch.Tensor) and name not in OPTIONS and name not in _OF_NO_EFFECT
    ]
    if added:
        return f"its layers add to attention what blocks do not hold: {', '.join(added)}"
    window = given.get("sliding_window")
    if window and not is_masked(window):
        return (
            f"expected no sliding_window, got {window}: its attention is given the window, its masks are not, and which of "
            "them counts depends on the attention function that transformers runs it with"
        )
    return None


def set_attention(model: transformers.PreTrainedModel, name: str) -> None:
    """Let a model attend by the function of this name, but for the parts whose code has only its own.

    transformers warns of each of those, and of each that is not there: text may call none of them.
    """
    with silence_transformers():
        model.set_attn_implementation(name)


@contextmanager
def attention_by(model: transformers.PreTrainedModel, attend: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Within, the model attends by this function, in this thread; then each part again by the one that it had."""
    parts = [part for part in model.modules() if isinstance(part, transformers.PreTrainedModel)]
    before = [(part.config, part.config._attn_implementation) for part in parts]
    set_attention(model, _PROBE_NAME)
    token = _attend.set(attend)
    try:
        with watch_windows():
            yield
    finally:
        _attend.reset(token)
        for config, implementation in before:  # outer ones first: what is set of one, is set of all within it
            config._attn_implementation = implementation


def _attend_in_batch(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    rotary: Rotary | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the running batch, with the options that the layer had when it was probed."""
    if torch.compiler.is_compiling():
        return opaque_attention(module.radixkv_layer_idx, query, key, value, *(rotary or (None, None))), None
    forward_pass = running.get(None)
    if forward_pass is None:
        raise RuntimeError(
            "model: it was given to an LLM, which runs it; model.set_attn_implementation('sdpa'), or 'eager' for models "
            "without that, lets you call it again"
        )
    return forward_pass.attend(module.layer_idx, NewTokens(query, key, value, rotary)), None


def _probe(*args: Any, **options: Any) -> tuple[torch.Tensor, None]:
    return _attend.get()(*args, **options), None


AttentionInterface.register(ATTENTION_NAME, _attend_in_batch)
AttentionInterface.register(_PROBE_NAME, _probe)
AttentionMaskInterface.register(_PROBE_NAME, make_mask)
