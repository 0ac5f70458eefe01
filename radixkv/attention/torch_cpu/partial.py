"""One partial attention result on the CPU: an output and its log-sum-exp, for some queries over some of their keys.

All shapes are ``[batch, heads, rows, dim]``; the log-sum-exp is natural, float32, ``[batch, heads, rows]``. A row that
sees no key yields an output of 0 and a log-sum-exp of minus infinity, so that it weighs nothing in a merge.
"""

from __future__ import annotations

import torch

from radixkv.attention.options import AttentionOptions

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Visibility:
    """Which keys each query row sees, where that is not all of them.

    Args:
        visible: bool ``[batch, rows, keys]`` (or ``[rows, keys]`` for a batch of one).
    """

    def __init__(self, visible: torch.Tensor) -> None:
        self._visible = visible if visible.dim() == 3 else visible.unsqueeze(0)
        self._biases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        blind = ~self._visible.any(dim=-1)
        self._blind = blind if bool(blind.any()) else None

    def keys(self, start: int, stop: int) -> Visibility:
        """The same rows over some of the keys."""
        return Visibility(self._visible[..., start:stop])

    def bias(self, group: int, dtype: torch.dtype) -> torch.Tensor:
        """``[batch, 1, rows * group, keys]``: 0 or minus infinity, each row repeated for the heads folded into it."""
        bias = self._biases.get((group, dtype))
        if bias is None:
            bias = torch.zeros(self._visible.shape, dtype=dtype).masked_fill_(~self._visible, float("-inf"))
            bias = self._biases[group, dtype] = bias.repeat_interleave(group, dim=1).unsqueeze(1)
        return bias

    def empty_blind_rows(
        self, group: int, output: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the rows that see no key at all weigh nothing in a merge."""
        if self._blind is None:
            return output, lse
        blind = self._blind.repeat_interleave(group, dim=1).unsqueeze(1)
        return output.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, float("-inf"))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
    *,
    causal: bool = False,
    visibility: Visibility | None = None,
    group: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend ``query`` to ``key`` and ``value``; query heads are a multiple of key heads.

    Args:
        options: of which the scale and the softcap count here.
        causal: row i sees keys up to i (as many rows as keys).
        visibility: which keys the rows see, None: all. Excludes ``causal``.
        group: how many heads are folded into each of ``visibility``'s rows.
    """
    bias = None
    if visibility is not None:
        bias = visibility.bias(group, query.dtype).expand(query.shape[0], 1, query.shape[2], key.shape[2])
    if options.softcap is None and query.shape[-1] == value.shape[-1]:
        # The operator assumes that the numbers of a head are contiguous.
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        output, lse = _flash(query, key, value, 0.0, causal, attn_mask=bias, scale=options.scale)
    else:
        output, lse = _attend_by_matmul(query, key, value, options, causal, bias)
    return (output, lse) if visibility is None else visibility.empty_blind_rows(group, output, lse)


def _attend_by_matmul(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
    causal: bool,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch's flash kernel cannot do: capped scores, and values of another size than keys. Holds all scores at once."""
    group = query.shape[1] // key.shape[1]
    key, value = key.float(), value.float()
    if group > 1:
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.matmul(query.float(), key.transpose(-1, -2)).mul_(options.scale)
    if options.softcap is not None:
        scores = scores.div_(options.softcap).tanh_().mul_(options.softcap)
    if causal:
        scores = scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1), float("-inf"))
    if bias is not None:
        scores = scores.add_(bias)
    lse = torch.logsumexp(scores, dim=-1)
    return torch.matmul(torch.softmax(scores, dim=-1), value).to(query.dtype), lse
