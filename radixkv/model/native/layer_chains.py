"""Decoder layers that follow one another and are computed in one call.

A layer continues the previous one's chain if it is called with the very tensor that the previous one returned, and the same
positions. Whether anything else reads the states between layers follows from no property of a model, so it is found out by
a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from radixkv.memory import KVPool
from radixkv.model.native.layer import NativeDecoderLayer
from radixkv_cpu import DecoderLayers

Chain = Sequence[NativeDecoderLayer]


@contextmanager
def watch_chains(model: nn.Module) -> Iterator[list[list[NativeDecoderLayer]]]:
    """Run each layer of the model by itself within, and note which of them form chains.

    Yields:
        The chains found so far.
    """
    layers = [module for module in model.modules() if isinstance(module, NativeDecoderLayer)]
    join_layers([[layer] for layer in layers])
    chains: list[list[NativeDecoderLayer]] = []
    # Each layer's output and positions. They are kept alive, or a new tensor could take their identity.
    given: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = []

    def note(layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: torch.Tensor) -> None:
        assert isinstance(layer, NativeDecoderLayer)
        positions = tuple(options["position_embeddings"])
        follows = (
            bool(given and args)
            and args[0] is given[-1][0]
            and all(mine is its for mine, its in zip(positions, given[-1][1], strict=True))
            and all(each.layer.is_whole and each.layer.dtype == layer.layer.dtype for each in (layer, chains[-1][-1]))
        )
        if follows:
            chains[-1].append(layer)
        else:
            chains.append([layer])
        given.append((output, positions))

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(note, with_kwargs=True))
        yield chains


def join_layers(chains: Sequence[Chain]) -> None:
    """Have the first layer of each chain compute all of it."""
    for first, *others in chains:
        first.chain = [first, *others]
        for layer in others:
            layer.chain = None


def layers_over(pool: KVPool, chains: Sequence[Chain], layer_of: Mapping[int, int]) -> dict[int, DecoderLayers]:
    """The call that computes each chain over a pool, by the index of its first layer.

    Args:
        layer_of: by a layer's index, which of the pool's it is.
    """
    calls = {}
    for chain in chains:
        in_pool = [layer_of[layer.layer_idx] for layer in chain]
        keys, values = ([caches[i] for i in in_pool] for caches in (pool.keys, pool.values))
        calls[chain[0].layer_idx] = DecoderLayers([layer.layer for layer in chain], keys, values)
    return calls
