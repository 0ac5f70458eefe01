"""The logits of some rows of a batch only, also of models whose code computes those of all rows."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformers
from torch import nn

ARGUMENT = "logits_to_keep"
"""By which most models are told the rows."""


def head_of_all_rows(model: transformers.PreTrainedModel) -> nn.Module | None:
    """The output head of a model that has no `ARGUMENT`; None: it has, or there is no head."""
    if ARGUMENT in inspect.signature(model.forward).parameters:
        return None
    head: nn.Module | None = model.get_output_embeddings()
    return head


def given_rows(head: nn.Module | None, rows: torch.Tensor) -> AbstractContextManager[Any]:
    """Within, a head is given only these rows of its input.

    Args:
        head: from `head_of_all_rows`; None: nothing is changed.
        rows: int64 indices.
    """

    def select(_: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        return inputs[0].index_select(1, rows)

    return nullcontext() if head is None else head.register_forward_pre_hook(select)
