"""Whether the last decoder layer needs to compute only the rows whose logits are wanted.

If what follows it (a norm, the output head) computes each row from that row alone, all but the last of a prompt's rows are
needed only for their keys and values. Whether this holds follows from no property of a model, so it is found out by a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from radixkv.model.native.layer import NativeDecoderLayer


@contextmanager
def nan_in_other_rows(model: nn.Module, kept: int) -> Iterator[int | None]:
    """Within, the last decoder layer returns NaN in all rows but one: finite logits of that row then depend on no other.

    Args:
        kept: that row of a packed batch.

    Yields:
        The layer's index; None: it is not made of native modules, and returns all rows.
    """

    def replace_others(_: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
        rows = torch.full_like(output, torch.nan)
        rows[:, kept] = output[:, kept]
        return rows

    layers = {module.layer_idx: module for module in model.modules() if isinstance(module, NativeDecoderLayer)}
    if not layers:
        yield None
        return
    last = max(layers)
    with layers[last].register_forward_hook(replace_others):
        yield last
