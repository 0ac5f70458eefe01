"""Rotary embeddings of type longrope, whose factors are chosen once, for all sequences.

They divide frequencies by one of two lists of factors: the short ones up to ``original_max_position_embeddings``, the length
that a model was trained with first, and the long ones beyond it. transformers chooses anew at each call, by the longest
sequence of a batch; a cached key would then depend on what ran beside it. Here, as in vLLM, the length that sequences may
have decides for all of them: up to the original length, answers are transformers' own; beyond, those of longer sequences are.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from radixkv.model.positions.rotary_types import NEVER_CHANGED, fix, layers_of_type, prefix_of, restore_frequencies
from radixkv.model.replacement.replace_modules import replace_modules

LONGROPE = "longrope"


class FixedRotation(nn.Module):
    """Stands in for a rotary embedding, which it takes over, and whose factors only `choose` changes.

    Args:
        rotary: as transformers makes them: with a ``rope_type``, or one for each type of layers; some are longrope.
    """

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        # Not a part of it: what an engine chooses is no part of the model's fingerprint.
        self._rotary: tuple[Any] = (rotary,)
        self._layer_types = layers_of_type(rotary, LONGROPE)
        fix(rotary, self._layer_types)
        # Its own, for `_choose` changes it.
        self._rotary[0].config = copy.deepcopy(self._rotary[0].config)
        self._given = {layer_type: dict(self._rope_parameters(layer_type)) for layer_type in self._layer_types}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._rotary[0](*args, **kwargs)

    @property
    def original_length(self) -> int:
        """Tokens of a sequence up to which all factors are the short ones."""
        return min(int(parameters["original_max_position_embeddings"]) for parameters in self._given.values())

    @torch.inference_mode()
    def choose(self, num_tokens: int) -> dict[str | None, str]:
        """Rotate as transformers rotates a sequence of so many computed tokens: "short" or "long", by the type of layers."""
        return {layer_type: self._choose(layer_type, num_tokens) for layer_type in self._layer_types}

    def _choose(self, layer_type: str | None, num_tokens: int) -> str:
        rotary = self._rotary[0]
        parameters = self._given[layer_type]
        original_length = parameters["original_max_position_embeddings"]
        chosen = "long" if num_tokens > original_length else "short"
        restore_frequencies(rotary, layer_type)
        if chosen == "long":
            frequencies = getattr(rotary, f"{prefix_of(layer_type)}inv_freq")
            compute: Any = ROPE_INIT_FUNCTIONS[LONGROPE]
            long, _ = compute(rotary.config, frequencies.device, seq_len=original_length + 1, layer_type=layer_type)
            frequencies.copy_(long)
        if f"{chosen}_mscale" in parameters:
            # phimoe chooses its scale at each call, too, and reads its configuration there: one of another type has but the
            # scale that it names. Its frequencies are always by the short factors.
            scale = parameters[f"{chosen}_mscale"]
            self._rope_parameters(layer_type).update(rope_type=NEVER_CHANGED, attention_factor=scale)
        return chosen

    def _rope_parameters(self, layer_type: str | None) -> dict[str, Any]:
        parameters: dict[str, Any] = self._rotary[0].config.rope_parameters
        return parameters if layer_type is None else parameters[layer_type]


def has_fixable_rotation(model: nn.Module) -> bool:
    """Whether some of a model's rotary embeddings are of type longrope, and made so that their factors can be chosen."""
    return any(isinstance(module, FixedRotation) or layers_of_type(module, LONGROPE) for module in model.modules())


def choose_factors(model: transformers.PreTrainedModel, max_model_len: int) -> str | None:
    """Choose the factors of all rotary embeddings of type longrope, whatever was chosen before.

    Args:
        model: is changed: no call of it changes them again.
        max_model_len: tokens that a sequence may have. The last one is never computed.

    Returns:
        "short" or "long"; where types of layers differ, such as "full_attention: long, sliding_attention: short"; None: the
        model has no such embeddings.
    """
    embeddings = [module for module in model.modules() if layers_of_type(module, LONGROPE)]
    replace_modules(model, {rotary: FixedRotation(rotary) for rotary in embeddings})
    chosen: dict[str | None, str] = {}
    for rotation in _fixed_rotations(model):
        chosen |= rotation.choose(max_model_len - 1)
    if len({*chosen.values()}) <= 1:
        return next(iter(chosen.values()), None)
    return ", ".join(sorted(f"{layer_type}: {which}" for layer_type, which in chosen.items()))


def original_length(model: nn.Module) -> int:
    """Tokens of a sequence up to which all factors are the short ones, of a model to which `choose_factors` gave some."""
    return min(rotation.original_length for rotation in _fixed_rotations(model))


def _fixed_rotations(model: nn.Module) -> list[FixedRotation]:
    return [module for module in model.modules() if isinstance(module, FixedRotation)]
