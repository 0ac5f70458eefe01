"""The bytes behind the block ids: one pool of keys and values per device.

::

    kv_pool.py              the pool; fp8_kv_pool.py: a byte for each number
    state_pool.py           states of recurrent layers, beside them
    block_rows.py           its blocks as rows of bytes, for tiers below it; spare_rows.py: memory for blocks on their way
    upload.py               from the host to the device, without waiting for it
    pages.py                pages of memory, taken before they are written, and returned when they are free
"""

from radixkv.memory.fp8_kv_pool import Fp8KVPool, KVScales
from radixkv.memory.kv_pool import KVPool, LayerShape
from radixkv.memory.state_pool import StatePool, StateShape

__all__ = ["Fp8KVPool", "KVPool", "KVScales", "LayerShape", "StatePool", "StateShape"]
