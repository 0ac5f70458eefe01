"""Calls a model's recurrent layers sequence by sequence, with states from wherever the caller keeps them.

Transformers gives a recurrent layer all sequences of equal length and a cache that has the states of its whole batch. Here a
batch is one row of all sequences' new tokens. So a layer's `forward` is replaced while an engine has the model: it hands its
input to the forward pass that runs, which calls the original for one sequence, or for one token of each of several, with a
cache of transformers' own class around the states that it chose.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from radixkv.errors import UnsupportedModelError
from radixkv.memory import StateShape
from radixkv.model.forward_pass import ForwardPass, running

# How transformers calls the argument that a layer's states are in, by the newest name first.
_CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")
# The methods of a `Cache` by which layers store states.
_UPDATES = frozenset({"update_conv_state", "update_recurrent_state"})
# More states than any layer has.
_MAX_STATES = 8

# Gives ``[sequences, tokens, ...]`` of an argument ``[1, all tokens, ...]``.
Choose = Callable[[torch.Tensor], torch.Tensor]


def keeps_states(module: nn.Module) -> bool:
    """Whether a module is a layer that stores states in a cache itself, as its code says."""
    if not hasattr(module, "layer_idx"):
        return False
    functions = (inspect.unwrap(each) for each in vars(type(module)).values() if inspect.isfunction(each))
    return any(not _UPDATES.isdisjoint(function.__code__.co_names) for function in functions)


def take_over_layers(model: nn.Module, name: str) -> list[RecurrentLayer]:
    """Have the forward passes of an engine call the recurrent layers of a model, in the order of its modules.

    Args:
        name: of the model.

    Raises:
        UnsupportedModelError: a layer is not called as transformers' are.
    """
    modules = [module for module in model.modules() if keeps_states(module)]
    layers = [RecurrentLayer(module, index, name) for index, module in enumerate(modules)]
    for module, layer in zip(modules, layers, strict=True):
        vars(module)["forward"] = layer
    return layers


class RecurrentLayer:
    """Takes the place of a recurrent layer's `forward`.

    Args:
        module: the layer.
        index: of its states in a `StatePool`.
        model_name: for messages.

    Attributes:
        shapes: of its states, in the order of the pool; known after the first forward pass.
    """

    def __init__(self, module: nn.Module, index: int, model_name: str) -> None:
        self.index = index
        self._name = f"{model_name}: its recurrent layers ({type(module).__name__})"
        self.shapes: tuple[StateShape, ...] = ()
        self._layer_idx: int = module.layer_idx  # type: ignore[assignment]
        given: Any = module.forward
        # In place of another engine's.
        self._own: Callable[..., Any] = given._own if isinstance(given, RecurrentLayer) else given
        self._signature = inspect.signature(self._own)
        names = [name for name in _CACHE_ARGUMENTS if name in self._signature.parameters]
        if not names:
            raise UnsupportedModelError(
                f"{self._name} have no argument {' or '.join(_CACHE_ARGUMENTS)} with their states"
            )
        self._cache_name = names[0]
        # What it would reach of the forward pass is meant for all tokens of a batch.
        self._within = ForwardPass(self._refuse, self._refuse)
        # The attribute of transformers' layer cache, and the key in it, of each state.
        self._keys: list[tuple[str, int]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = running.get(None)
        if current is None:  # the model is called by itself
            return self._own(*args, **kwargs)
        arguments = dict(self._signature.bind(*args, **kwargs).arguments)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments |= arguments.pop(name, {})
        arguments.pop(self._cache_name, None)
        return current.recur(RecurrentCall(self, arguments))

    def new_states(self, device: torch.device) -> list[torch.Tensor]:
        """Memory for the states of one sequence."""
        return [torch.empty(1, *shape.dims, dtype=shape.dtype, device=device) for shape in self.shapes]

    def call(self, arguments: Mapping[str, Any], states: Sequence[torch.Tensor] | None, begun: bool) -> torch.Tensor:
        """What the layer gives for sequences of equal length, whose states it changes in place.

        Args:
            arguments: all but the cache; tensors begin ``[sequences, tokens]``.
            states: each ``[sequences, *dims]``; None: the sequences begin, and their states are not wanted.
            begun: whether there were tokens before; otherwise what is in ``states`` is not read.
        """
        cache = LinearAttentionLayer(_MAX_STATES)
        cache.has_previous_state = dict.fromkeys(cache.has_previous_state, begun)
        for (attribute, key), state in zip(self._keys, states or (), strict=False):
            getattr(cache, attribute)[key] = state
            getattr(cache, f"is_{attribute}_initialized")[key] = True
            if attribute == "conv_states":
                cache.conv_kernel_size[key] = state.shape[-1]
        token = running.set(self._within)
        try:
            output = self._own(**arguments, **{self._cache_name: Cache(layers=[cache] * (self._layer_idx + 1))})
        finally:
            running.reset(token)
        if not isinstance(output, torch.Tensor):
            raise UnsupportedModelError(f"{self._name} return more than the states of the next layer")
        if not self._keys:
            self._note_states(cache)
        return output

    def _refuse(self, *_: Any) -> torch.Tensor:
        raise UnsupportedModelError(f"{self._name} attend to earlier tokens besides, or have others in them")

    def _note_states(self, cache: LinearAttentionLayer) -> None:
        for attribute in ("conv_states", "recurrent_states"):
            for key, state in getattr(cache, attribute).items():
                if state is not None:
                    self._keys.append((attribute, key))
                    self.shapes += (StateShape(tuple(state.shape[1:]), state.dtype),)


@dataclass(frozen=True, slots=True)
class RecurrentCall:
    """One call of a recurrent layer, for the new tokens of all sequences of a batch.

    Attributes:
        layer: that is called.
        arguments: all but the cache; the first one is ``[1, tokens, dim]``, as is what the layer gives.
    """

    layer: RecurrentLayer
    arguments: Mapping[str, Any]

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        hidden_states: torch.Tensor = next(iter(self.arguments.values()))
        return hidden_states.shape[1]

    def run(self, choose: Choose, states: Sequence[torch.Tensor] | None, begun: bool) -> torch.Tensor:
        """Call the layer for some of the tokens.

        Args:
            choose: gives theirs of each argument.
            states: see `RecurrentLayer.call`.
            begun: likewise.
        """
        count = self.num_tokens
        chosen = {name: _choose(value, count, choose) for name, value in self.arguments.items()}
        return self.layer.call(chosen, states, begun)


def _choose(value: Any, num_tokens: int, choose: Choose) -> Any:
    if isinstance(value, tuple):
        return tuple(_choose(each, num_tokens, choose) for each in value)
    if isinstance(value, torch.Tensor) and value.shape[:2] == (1, num_tokens):
        return choose(value)
    return value
