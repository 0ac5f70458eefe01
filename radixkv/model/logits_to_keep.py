"""The logits of some rows of a batch only, also of models whose code computes those of all rows."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers
from torch import nn

_ARGUMENT = "logits_to_keep"


def has_logits_to_keep(model: transformers.PreTrainedModel) -> bool:
    """Whether the model has transformers' argument ``logits_to_keep``, which names these rows, as most have."""
    return _ARGUMENT in inspect.signature(model.forward).parameters


def head_of_all_rows(model: transformers.PreTrainedModel) -> nn.Module | None:
    """The output head of a model without ``logits_to_keep``; None: the model has it, or there is no head."""
    if has_logits_to_keep(model):
        return None
    head: nn.Module | None = model.get_output_embeddings()
    return head


@contextmanager
def wanted_rows(head: nn.Module | None, rows: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
    """Within, a model computes only the logits of these rows, if it is called with the arguments that this gives.

    Args:
        head: from `head_of_all_rows`, which is given only these rows of its input; None: the model has ``logits_to_keep``.
        rows: int64 indices.
    """
    if head is None:
        yield {_ARGUMENT: rows}
        return

    def select(_: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        return inputs[0].index_select(1, rows)

    with head.register_forward_pre_hook(select):
        yield {}
