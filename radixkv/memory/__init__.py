"""The bytes behind the block ids: one pool of keys and values per device."""

from radixkv.memory.fp8_kv_pool import Fp8KVPool, KVScales
from radixkv.memory.kv_pool import KVPool, LayerShape

__all__ = ["Fp8KVPool", "KVPool", "KVScales", "LayerShape"]
