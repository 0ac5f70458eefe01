"""Triton kernels for attention over paged keys and values that many sequences share.

Only torch and Triton are needed; nothing here depends on radix trees or requests. One idea per file::

    cache_write            new keys and values go into their blocks
    rotary_cache_write     the same, with keys and queries rotated, the latter into a tensor of their own
    block_copy             copy-on-write: many blocks of all layers in one launch
    work_items             the int32 buffers that say which query rows read which keys
    item_attention         one partial result per work item: shared prefixes, private tails, causal prompts
    split_decode           the same for one token per sequence where nothing is shared: no items needed
    merge                  partial results into the final output
    launch                 a launch made again with another layer's tensors, without checks
    advance                between two decoding steps: positions and slots of the next token
    exponential_sampling   one token per row, drawn from a whole vocabulary
    truncated_sampling     the same from what min_p, top_k and top_p leave of it
    online_softmax         a tile of query rows over a range of keys
    attention_common       what else the two attention kernels and their launchers have in common
    reference              the same operations in plain torch, the truth in tests
    target                 the GPU, or the interpreter, that kernels are compiled for
    checks                 arguments are checked before a kernel sees a pointer; checked_once: not again for tensors like them

Keys and values lie in ``[num_blocks, block_size, kv heads, dim]`` tensors, one pair per layer. The heads of a group are
packed into the rows of a tile, so a key is read once for all of them. Log-sum-exps are to base 2.

A kernel is compiled anew for arguments that are 1, or multiples of 16, or pointers to whole 16 bytes. So what changes from
batch to batch is not specialised on, nor how wide block tables are, and buffers should begin on 16 bytes.

Every kernel also runs in Triton's interpreter (``TRITON_INTERPRET=1`` before the import), which computes bfloat16 wrongly.
So all arithmetic is in a ``COMPUTE`` type, converted right after each load: float32 there, the query's type on a GPU.
"""

from radixkv_kernels.advance import advance_rows
from radixkv_kernels.block_copy import BlockCopier
from radixkv_kernels.cache_write import write_cache
from radixkv_kernels.checks import BLOCK_SIZES
from radixkv_kernels.exponential_sampling import draw_tokens
from radixkv_kernels.item_attention import TILE_ROWS, attend_items
from radixkv_kernels.launch import Launch, RepeatedLaunch
from radixkv_kernels.merge import merge_partials, merge_splits
from radixkv_kernels.online_softmax import TileConfig, tile_config
from radixkv_kernels.rotary_cache_write import rotate_and_write
from radixkv_kernels.split_decode import attend_split
from radixkv_kernels.truncated_sampling import draw_truncated
from radixkv_kernels.work_items import ITEM_FIELDS, NO_PARTIAL, OPEN_END

__all__ = [
    "BLOCK_SIZES",
    "ITEM_FIELDS",
    "NO_PARTIAL",
    "OPEN_END",
    "TILE_ROWS",
    "BlockCopier",
    "Launch",
    "RepeatedLaunch",
    "TileConfig",
    "advance_rows",
    "attend_items",
    "attend_split",
    "draw_tokens",
    "draw_truncated",
    "merge_partials",
    "merge_splits",
    "rotate_and_write",
    "tile_config",
    "write_cache",
]
