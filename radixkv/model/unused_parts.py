"""Parts of a model that text does not call, such as those that see images or hear: they would only take memory."""

from __future__ import annotations

from collections.abc import Callable

import transformers
from torch import nn

from radixkv.model.replace_modules import replace_modules


def drop_unused_parts(model: transformers.PreTrainedModel, run_text: Callable[[], object]) -> list[str]:
    """Drop, with their weights, the parts that are models of their own and are not called; returns their names.

    Others stay, even if they are not called: an expert may be by the next tokens.

    Args:
        model: is changed; it takes only text afterwards.
        run_text: runs the model on any tokens.
    """
    parts = {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, transformers.PreTrainedModel) and part not in (model, model.base_model)
    }
    if not parts:
        return []
    called: set[nn.Module] = set()
    hooks = [part.register_forward_pre_hook(lambda module, _: called.add(module)) for part in parts.values()]
    try:
        run_text()
    finally:
        for hook in hooks:
            hook.remove()
    dropped = {name: part for name, part in parts.items() if part not in called}
    replace_modules(model, {part: nn.Module() for part in dropped.values()})
    return [*dropped]
