"""States move with their blocks, and nobody goes on from others."""

from __future__ import annotations

import pytest
import torch

from radixkv.cache import BlockCopy
from radixkv.memory import KVPool, LayerShape, StatePool, StateShape

LAYERS = [[StateShape((2, 3), torch.float32)], [StateShape((4,), torch.bfloat16), StateShape((1,), torch.float32)]]


def test_copies_are_carried_out_in_order() -> None:
    """A later one may read what an earlier one wrote, and overwrite what it read."""
    pool = StatePool(LAYERS, num_blocks=5, block_size=4)
    for tensor in pool.tensors:
        tensor.copy_(torch.arange(5).view(-1, *[1] * (tensor.dim() - 1)))
    pool.copy_blocks([BlockCopy(1, 2, 3), BlockCopy(2, 3, 3), BlockCopy(4, 1, 2)])
    assert all(tensor.flatten(1)[:, 0].tolist() == [0, 4, 1, 1, 4] for states in pool.states for tensor in states)
    assert pool.num_tokens.tolist() == [0, 4, 1, 1, 4]


def test_a_block_is_gone_on_from_only_where_its_states_are() -> None:
    pool = StatePool(LAYERS, num_blocks=5, block_size=4)
    pool.num_tokens[torch.tensor([1, 3])] = torch.tensor([4, 2])
    pool.check(torch.tensor([3, 1]), torch.tensor([2, 4]))
    with pytest.raises(RuntimeError, match=r"^block 3: expected states after 1 of its tokens, got those after 2$"):
        pool.check(torch.tensor([1, 3]), torch.tensor([4, 1]))


def test_bytes_of_a_block_include_its_states() -> None:
    layers = [LayerShape(2, 8, 8)]
    plain, pool = (KVPool(layers, 3, 4, torch.float32, recurrent_layers=states) for states in ((), LAYERS))
    assert pool.block_nbytes == plain.block_nbytes + 2 * 3 * 4 + 4 * 2 + 4 + 8
    assert (plain.states, pool.nbytes) == (None, 3 * pool.block_nbytes)
