"""Attention over the cache's blocks: which queries read which keys, and the backends that carry it out.

One batch, from block tables to kernel launches::

    query_batch           block tables, num_context, num_new: what the engine gives; options: what a layer gives
      |
    batch_tables          the tables as one array, kept from step to step, sharers next to each other
      |
    prefix_groups         which neighbours have a prefix in common that is worth reading once, by a sharing_rule
      |
    plan                  rows of the packed batch (positions, slots), and KeyRanges: shared prefixes, private tails
      |                                                                    made by Planner, host arrays only
      +-- native/         ranges as they are -> native code that reads blocks in place         } over host_backend
      |                                                                                        }
      +-- torch_cpu/      lower -> ViewCall, GatherCall, CausalCall -> torch's flash attention }
      |
      +-- triton/         BatchBuffers: tables and rows on the device
                          lower -> work items per HeadShape, uploaded -> write_cache, attend_items, merge_partials
                          PaddedDecode: the same in buffers of fixed size, for CUDA graphs

A plan serves all layers; what a backend derives from it (calls per sliding window, items per head shape) is built when the
first layer needs it. A backend's `SharingRule` decides when sharing pays; everything else it takes from the plan.
`backend` is the interface of all, and `choice` makes the one that an option names.
"""

from radixkv.attention.backend import AttentionBackend, AttentionBatch, BatchLimits
from radixkv.attention.options import AttentionLayer, AttentionOptions, NewTokens, Rotary
from radixkv.attention.plan import AttentionPlan, KeyRanges, Planner
from radixkv.attention.query_batch import QueryBatch, ReadableTable
from radixkv.attention.sharing_rule import SharingRule

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "AttentionLayer",
    "AttentionOptions",
    "AttentionPlan",
    "BatchLimits",
    "KeyRanges",
    "NewTokens",
    "Planner",
    "QueryBatch",
    "ReadableTable",
    "Rotary",
    "SharingRule",
]
