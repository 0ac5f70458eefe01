"""The forward pass that runs in this thread, by which a model's layers reach the batch.

Compiled layers and eager ones find it alike. It is not among their arguments: some models drop keyword arguments on the way
to their attention layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from radixkv.attention import NewTokens

if TYPE_CHECKING:
    from radixkv.model.native.layer import NativeDecoderLayer
    from radixkv.model.recurrent.layer import RecurrentCall

# Attends one layer, by its index; see `AttentionBatch.attend`.
Attend = Callable[[int, NewTokens], torch.Tensor]
# Computes a chain of layers in one call: the chain, its input, and the cosines and sines of the tokens' positions.
RunChain = Callable[
    ["Sequence[NativeDecoderLayer]", torch.Tensor, tuple[torch.Tensor, torch.Tensor]],
    torch.Tensor,
]

# Computes one recurrent layer for all tokens.
Recur = Callable[["RecurrentCall"], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """What the layers of a running model call.

    Attributes:
        attend: by attention layers.
        recur: by recurrent layers.
        run_chain: by the first layer of a chain; None: each layer is computed by itself, and attends.
    """

    attend: Attend
    recur: Recur
    run_chain: RunChain | None = None


running: ContextVar[ForwardPass] = ContextVar("running")
"""Set while a model runs, and only then."""
