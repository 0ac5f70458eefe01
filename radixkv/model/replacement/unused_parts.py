"""Parts of a model that text does not call, such as those for images or audio: they would only take memory."""

from __future__ import annotations

import logging

import torch
import transformers
from torch import nn

from radixkv.model.replacement.probe import compute_a_few_tokens, probe_attention, watch_calls
from radixkv.model.replacement.replace_modules import replace_modules
from radixkv.model.weights.deferred import ProductsOfZeros

_log = logging.getLogger(__name__)


class _UnusedPart(nn.Module):
    """What is left of a part of a model: some models read the device or type of one, whatever they compute."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        super().__init__()
        self.device, self.dtype = model.device, model.dtype


def drop_unused_parts(model: transformers.PreTrainedModel, name: str) -> None:
    """Drop, with their weights, the parts that are models of their own and that text does not call.

    Others stay, even if they are not called: an expert may be by the next tokens.

    Args:
        model: is changed; it takes only text afterwards.
        name: of the model.
    """
    parts = {
        path: part
        for path, part in model.named_modules()
        if isinstance(part, transformers.PreTrainedModel) and part not in (model, model.base_model)
    }
    if not parts:
        return
    called: set[nn.Module] = set()
    within = {module for part in parts.values() for module in part.modules()}
    with (
        watch_calls(within, lambda module, *_: called.add(module)),
        torch.inference_mode(),
        probe_attention(model),
        ProductsOfZeros(),
    ):
        compute_a_few_tokens(model)
    # A part's own forward need not be called: a model may call what is in it.
    unused = {part: path for path, part in parts.items() if called.isdisjoint(part.modules())}
    replace_modules(model, {part: _UnusedPart(model) for part in unused})
    if unused:
        _log.info("%s: only text is computed; %s is not kept in memory", name, ", ".join(unused.values()))
