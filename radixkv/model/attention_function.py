"""The attention functions that transformers has by name: which one a model calls, and with what options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers

# The engine's attention function, the one by which modules are compared, and the one that notes what layers pass.
ATTENTION_NAME = "radixkv"
PROBE_NAME = "radixkv_probe"
NOTING_NAME = "radixkv_noting"
OWN_NAMES = frozenset({ATTENTION_NAME, PROBE_NAME, NOTING_NAME})
# Arguments of an attention function that describe a layer, besides what changes with every batch.
OPTIONS = ("scaling", "softcap", "sliding_window", "s_aux")


def layer_options(
    query: torch.Tensor, given: Mapping[str, Any]
) -> tuple[float, float | None, int | None, torch.Tensor | None]:
    """The first four of `AttentionOptions`, by what an attention function was given."""
    scale = given.get("scaling") or query.shape[-1] ** -0.5
    return scale, given.get("softcap"), given.get("sliding_window"), given.get("s_aux")


@contextmanager
def attention_by(model: transformers.PreTrainedModel, name: str) -> Iterator[None]:
    """Within, the model attends by the function of this name; then again by the one that it had."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)
