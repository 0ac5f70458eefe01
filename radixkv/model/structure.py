"""What a model is made of, as far as running it over blocks depends on it.

Configurations do not say it: not every layer's shapes, and not what reads the states between layers or after them. So a few
tokens are run, with attention that only observes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from radixkv.attention import AttentionLayer
from radixkv.errors import UnsupportedModelError
from radixkv.model.batch_checks import (
    Forward,
    refuse_forgetting,
    refuse_mixing,
    refuse_other_positions,
    tokens_to_try,
)
from radixkv.model.layer_probe import attend_nothing, watch_layers
from radixkv.model.loader import LoadedModel
from radixkv.model.model_errors import errors_of_model
from radixkv.model.native import Chain, join_layers, nan_in_other_rows, watch_chains
from radixkv.model.recurrent import RecurrentLayer


@dataclass(frozen=True, slots=True)
class ModelStructure:
    """What was found out.

    Attributes:
        layers: the attention layers by their index, in the order of the pool's layers.
        chains: of layers that native code may compute in one call, each of which its first layer starts.
        last_layer: the index of the last layer, if of its rows only those matter whose logits are wanted.
        num_logits: per row of logits.
    """

    layers: Mapping[int, AttentionLayer]
    chains: Sequence[Chain]
    last_layer: int | None
    num_logits: int


@torch.inference_mode()
def find_structure(loaded: LoadedModel, forward: Forward, recurrent_layers: Sequence[RecurrentLayer]) -> ModelStructure:
    """Find out the structure of a model, and join its layers into chains.

    Args:
        forward: of the model.
        recurrent_layers: of the model; their shapes are known afterwards.

    Raises:
        UnsupportedModelError: the model cannot run over blocks, or not several sequences in a batch.
    """
    model, name = loaded.model, loaded.name
    tokens = tokens_to_try(model, loaded.vocab_size, loaded.device)
    positions = torch.arange(3, device=loaded.device)
    with (
        watch_layers(model, name) as called,
        nan_in_other_rows(model, kept=1) as last,
        watch_chains(model) as chains,
        errors_of_model(model),
    ):
        logits = forward(tokens, positions, positions[1:2], attend_nothing)
    if len(logits) != 1:
        raise UnsupportedModelError(f"{name}: it computes logits of other tokens than those that are wanted")
    if not called:
        raise UnsupportedModelError(f"{name}: no layer of the model calls the attention interface")
    needs_one_row = last == [*called][-1] and bool(logits.isfinite().all())
    refuse_mixing(forward, tokens, name)
    refuse_other_positions(forward, tokens, name)
    if recurrent_layers:
        refuse_forgetting(forward, tokens, recurrent_layers, name)
        needs_one_row = False  # a recurrent layer behind the last one that attends needs all rows
    join_layers(chains)
    joined = forward(tokens, positions, positions[1:2], attend_nothing)
    if not (torch.equal(joined, logits) and logits.any()):  # something reads the states between layers
        chains = [[layer] for chain in chains for layer in chain]
        join_layers(chains)
    return ModelStructure(dict(sorted(called.items())), chains, last if needs_one_row else None, logits.shape[1])
