"""The int32 buffers in which the attention kernel finds which query rows read which keys.

A work item is a tile of neighbouring query rows over a range of positions, read through one block table::

    field            meaning
    0 row_start      first query row
    1 num_rows       neighbouring rows; 0: an empty item, whose programs return at once (padding for CUDA graphs)
    2 table          row of the block tables through which the keys are found
    3 key_start      first position
    4 key_stop       one past the last position. No row sees beyond its own position, so a private tail that grows by
                     a token per step has OPEN_END once and for all
    5 partial_start  the item's first row among the partial results, the others follow; NO_PARTIAL: the item is all
                     that its rows read, so the final output is written at once

All layers share the buffers. Between two decoding steps only the positions change, which a kernel adds 1 to.
"""

from __future__ import annotations

ITEM_FIELDS = 6
"""int32 numbers per work item."""
OPEN_END = 2**31 - 1
"""As the end of an item's keys: up to each row's own position."""
NO_PARTIAL = -1
"""As an item's partial result: it writes the final output of its rows."""
