"""Checks that a model can run several sequences in a batch: tokens mix only in attention, at the positions that are given.

Not every configuration says so. So the model is run with attention of each token to itself alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import transformers

from radixkv.errors import UnsupportedModelError
from radixkv.model.forward_pass import Attend, Recur
from radixkv.model.layer_probe import attend_itself
from radixkv.model.recurrent import RecurrentLayer, recur_from, recur_in_one

# By how much rounding may change one token's logits, relative to their norm, if other rows are computed beside it.
_ROUNDING = 0.05
# How far off a model is that forgets part of its states, relative to one that forgets all of them. In bfloat16, rounding was
# found to amount to 0.06.
_FORGOTTEN = 0.12


class Forward(Protocol):
    """Logits of rows by all tokens and their positions (None: as the model counts those of one sequence)."""

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        rows: torch.Tensor,
        attend: Attend,
        recur: Recur = ...,
        /,
    ) -> torch.Tensor: ...


def tokens_to_try(model: transformers.PreTrainedModel, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Three tokens other than padding, whose embedding is zero and which some models skip when they count positions.

    Args:
        model: that they are for.
        vocab_size: of the model.
        device: that it runs on.
    """
    padding = {
        getattr(model.config.get_text_config(), "pad_token_id", None),
        getattr(model.get_input_embeddings(), "padding_idx", None),
    }
    usual = [token for token in range(5) if token not in padding]
    return torch.tensor(usual[:3], device=device) % vocab_size


def refuse_mixing(forward: Forward, tokens: torch.Tensor, name: str) -> None:
    """Refuse a model that mixes tokens outside of attention, as by a convolution of keys, or that heeds no positions.

    If each token attends only to itself, the logits of a token must depend neither on the token before it nor on its row.

    Args:
        forward: of the model.
        tokens: from `tokens_to_try`.
        name: of the model.

    Raises:
        UnsupportedModelError: it does so.
    """
    first, second, other = tokens.tolist()
    pairs = torch.tensor([first, second, other, second], device=tokens.device)
    positions = torch.tensor([0, 1, 0, 1], device=tokens.device)
    rows = torch.tensor([1, 3], device=tokens.device)
    one, another = forward(pairs, positions, rows, attend_itself).float()
    if (one - another).norm() > _ROUNDING * one.norm():
        # The last token in the same row, behind others.
        behind_others = torch.tensor([second, first, first, second], device=tokens.device)
        (third,) = forward(behind_others, positions, rows[1:], attend_itself).float()
        if (third - another).norm() > _ROUNDING * another.norm():
            raise UnsupportedModelError(
                f"{name}: its layers mix tokens elsewhere than in attention (by a convolution, say), which needs state that "
                "blocks of keys and values do not hold"
            )
        raise UnsupportedModelError(
            f"{name}: it counts positions itself, whatever position_ids say, which a batch of several sequences does not "
            "allow"
        )


def refuse_other_positions(forward: Forward, tokens: torch.Tensor, name: str) -> None:
    """Refuse a model that does not count positions from 0: RoBERTa starts behind the number of its padding token.

    Args:
        forward: of the model.
        tokens: from `tokens_to_try`.
        name: of the model.

    Raises:
        UnsupportedModelError: it does so.
    """
    from_zero = torch.arange(len(tokens), device=tokens.device)
    ours, its_own = (forward(tokens, each, from_zero, attend_itself).float() for each in (from_zero, None))
    if (ours - its_own).norm() > _ROUNDING * its_own.norm():
        raise UnsupportedModelError(
            f"{name}: it counts positions from another number than 0, which a batch of several sequences does not"
        )


def refuse_forgetting(forward: Forward, tokens: torch.Tensor, layers: Sequence[RecurrentLayer], name: str) -> None:
    """Refuse a model whose recurrent layers do not go on from their states as if they had computed all tokens at once.

    In transformers 5.24, Mamba's first version does not where several tokens follow (jamba).

    Args:
        forward: of the model.
        tokens: from `tokens_to_try`.
        layers: the model's recurrent ones.
        name: of the model.

    Raises:
        UnsupportedModelError: it does so.
    """
    tokens = tokens.repeat(4)  # a state says little after one or two
    positions = torch.arange(len(tokens), device=tokens.device)

    def run(start: int, stop: int, recur: Recur) -> torch.Tensor:
        rows = positions[: stop - start]
        return forward(tokens[start:stop], positions[start:stop], rows, attend_itself, recur).float()

    whole, forgets = run(0, len(tokens), recur_in_one), False
    for middle in (len(tokens) // 2, len(tokens) - 1):
        states = [layer.new_states(tokens.device) for layer in layers]
        run(0, middle, recur_from(states, False))
        rest, expected = run(middle, len(tokens), recur_from(states, True)), whole[middle:]
        error, most = (rest - expected).norm(), (run(middle, len(tokens), recur_in_one) - expected).norm()
        forgets |= bool(error > _ROUNDING * expected.norm() and error > _FORGOTTEN * most)
    # By weights that give a state little effect, it would not show. What is never read changes nothing at all.
    for number in range(max(len(layer.shapes) for layer in layers)):
        states = [layer.new_states(tokens.device) for layer in layers]
        several = []
        for value in (0.0, 1.0):
            for own in states:
                for index, state in enumerate(own):
                    state.fill_(value if index == number else 0.0)
            several.append(run(0, 2, recur_from(states, True)))
        forgets |= torch.equal(*several)
    if forgets:
        raise UnsupportedModelError(
            f"{name}: with transformers {transformers.__version__}, its recurrent layers do not go on from a state with "
            "several tokens as if they had computed all at once, so prompts could not be computed in parts"
        )
