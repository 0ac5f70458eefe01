"""The attention functions that transformers has by name: which one a model calls, and with what options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface

from radixkv.model.window_mask import make_mask

# The engine's attention function, and the one that `attention_by` gives.
ATTENTION_NAME = "radixkv"
PROBE_NAME = "radixkv_probe"
OWN_NAMES = frozenset({ATTENTION_NAME, PROBE_NAME})
# Arguments of an attention function that describe a layer, besides what changes with every batch.
OPTIONS = ("scaling", "softcap", "sliding_window", "s_aux")

# Each thread has its own: several models may be probed at the same time.
_attend: ContextVar[Callable[..., torch.Tensor]] = ContextVar("attend")


def layer_options(
    query: torch.Tensor, given: Mapping[str, Any]
) -> tuple[float, float | None, int | None, torch.Tensor | None]:
    """The first four of `AttentionOptions`, by what an attention function was given."""
    scale = given.get("scaling") or query.shape[-1] ** -0.5
    return scale, given.get("softcap"), given.get("sliding_window"), given.get("s_aux")


@contextmanager
def attention_by(model: transformers.PreTrainedModel, attend: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Within, the model attends by this function, in this thread; then again by the one that it had."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation(PROBE_NAME)
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)
        model.set_attn_implementation(implementation)


def _probe(*args: Any, **options: Any) -> tuple[torch.Tensor, None]:
    return _attend.get()(*args, **options), None


AttentionInterface.register(PROBE_NAME, _probe)
AttentionMaskInterface.register(PROBE_NAME, make_mask)
