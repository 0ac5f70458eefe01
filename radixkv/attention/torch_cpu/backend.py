"""The plan carried out with torch on a CPU.

`lower` turns a plan's ranges of keys into calls, once per batch and sliding window, and every layer repeats those calls. The
heads of a group are folded into the query rows, so a key is read once for all of them. Partial results are merged into
``[rows, kv heads, group, dim]``, the layout that the model expects.
"""

from __future__ import annotations

import torch

from radixkv.attention.host_backend import HostBackend
from radixkv.attention.options import AttentionOptions, NewTokens
from radixkv.attention.plan import AttentionPlan
from radixkv.attention.torch_cpu import cost_model
from radixkv.attention.torch_cpu.calls import Call, CausalCall, GatherCall, ViewCall, lower
from radixkv.attention.torch_cpu.partial import attend
from radixkv.memory import KVPool

# A partial result: output ``[rows, kv heads, group, dim]`` and natural log-sum-exp ``[rows, kv heads, group]``.
Partial = tuple[torch.Tensor, torch.Tensor]


class TorchAttention:
    """Attention over one batch for all layers; an `AttentionBatch`."""

    def __init__(self, plan: AttentionPlan, pool: KVPool) -> None:
        self.order = plan.order
        self.row_starts = plan.row_starts
        self.positions = torch.from_numpy(plan.positions)
        self._plan = plan
        self._pool = pool
        self._slots = torch.from_numpy(plan.slots)
        self._calls_by_window: dict[int | None, list[Call]] = {}

    def attend(self, layer: int, new: NewTokens, options: AttentionOptions) -> torch.Tensor:
        """Write the batch's new keys and values into the pool, then attend; see `AttentionBatch.attend`."""
        query, key, value, rotary = new
        assert rotary is None
        stored = self._pool.write(layer, self._slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        num_query_heads, num_rows = query.shape[1], query.shape[2]
        num_kv_heads, value_dim = key.shape[1], value.shape[3]
        group = num_query_heads // num_kv_heads
        # [kv heads, rows, group, dim]: neighbouring rows and their group are one matrix per head.
        folded = query[0].unflatten(0, (num_kv_heads, group)).transpose(1, 2)
        calls = self._calls(options.sliding_window)
        merged: Partial | None = None
        for call in calls:
            if isinstance(call, CausalCall):
                partial = _attend_to_new(call, query, stored, group, options)
            elif isinstance(call, ViewCall):
                partial = self._attend_view(call, layer, folded, options)
            else:
                partial = self._attend_gathered(call, layer, folded, options)
            if len(calls) == 1:
                merged = partial
                break
            if merged is None:
                # In the precision of the sums, at least float32.
                dtype = partial[1].dtype
                merged = (
                    torch.zeros(num_rows, num_kv_heads, group, value_dim, dtype=dtype),
                    torch.full((num_rows, num_kv_heads, group), float("-inf"), dtype=dtype),
                )
            _merge(merged, call, partial)

        assert merged is not None, "every row sees at least itself"
        output, lse = merged
        if options.sinks is not None:
            # A sink adds exp(sink) to the softmax's denominator: the output shrinks by lse's share of the whole.
            share = torch.sigmoid(lse - options.sinks.float().view(num_kv_heads, group))
            output = output * share.unsqueeze(-1)
        return output.reshape(1, num_rows, num_query_heads, value_dim).to(query.dtype)

    def _calls(self, window: int | None) -> list[Call]:
        calls = self._calls_by_window.get(window)
        if calls is None:
            calls = self._calls_by_window[window] = lower(self._plan, window)
        return calls

    def _attend_view(self, call: ViewCall, layer: int, folded: torch.Tensor, options: AttentionOptions) -> Partial:
        group = folded.shape[2]
        stored = self._pool.read(layer, call.start, call.stop)
        keys, values = (rows.transpose(0, 1).unsqueeze(0) for rows in stored)
        rows = folded[:, call.rows].flatten(1, 2).unsqueeze(0)
        output, lse = attend(rows, keys, values, options, visibility=call.visibility, group=group)
        return output[0].unflatten(1, (-1, group)).transpose(0, 1), lse[0].unflatten(1, (-1, group)).transpose(0, 1)

    def _attend_gathered(
        self, call: GatherCall, layer: int, folded: torch.Tensor, options: AttentionOptions
    ) -> Partial:
        num_kv_heads, _, group, _ = folded.shape
        num_sequences, num_keys = call.slots.shape
        stored = self._pool.gather(layer, call.slots.view(-1))
        keys, values = (rows.view(num_sequences, num_keys, num_kv_heads, -1).transpose(1, 2) for rows in stored)
        # [sequences, kv heads, rows of each x group, dim]
        rows = folded[:, call.rows].unflatten(1, (num_sequences, -1)).transpose(0, 1).flatten(2, 3)
        output, lse = attend(rows, keys, values, options, visibility=call.visibility, group=group)
        return (
            output.unflatten(2, (-1, group)).transpose(1, 2).flatten(0, 1),
            lse.unflatten(2, (-1, group)).transpose(1, 2).flatten(0, 1),
        )


class TorchBackend(HostBackend):
    """Plans batches over one pool, whose tensors must be on the CPU."""

    sharing_cost_tokens = cost_model.SHARING_COST_TOKENS
    attention = TorchAttention


def _attend_to_new(
    call: CausalCall,
    query: torch.Tensor,
    stored: tuple[torch.Tensor, torch.Tensor],
    group: int,
    options: AttentionOptions,
) -> Partial:
    """A prompt's new tokens over themselves, as they were ``stored``: ``[rows, kv heads, dim]`` each."""
    keys, values = (rows[call.rows].transpose(0, 1).unsqueeze(0) for rows in stored)
    own, visibility = query[:, :, call.rows], call.visibility
    output, lse = attend(own, keys, values, options, causal=visibility is None, visibility=visibility)
    return output[0].unflatten(0, (-1, group)).permute(2, 0, 1, 3), lse[0].unflatten(0, (-1, group)).permute(2, 0, 1)


def _merge(merged: Partial, call: Call, partial: Partial) -> None:
    """Weigh a partial result into what its rows have so far (online softmax, Milakov and Gimelshein 2018)."""
    merged_output, merged_lse = merged
    output, lse = partial
    if call.first:
        merged_output[call.rows] = output.to(merged_output.dtype)
        merged_lse[call.rows] = lse
        return
    before, before_lse = merged_output[call.rows], merged_lse[call.rows]
    # Where neither side has seen a key, both are minus infinity: the weight would be NaN, and 0 keeps the row empty.
    weight = torch.sigmoid(lse - before_lse).nan_to_num_(nan=0.0)
    merged_output[call.rows] = torch.lerp(before, output.to(merged_output.dtype), weight.unsqueeze(-1))
    merged_lse[call.rows] = torch.logaddexp(before_lse, lse)
