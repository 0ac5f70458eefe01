"""The bytes behind the block ids: one pool of keys and values a device."""

from radixkv.memory.kv_pool import KVPool, LayerShape

__all__ = ["KVPool", "LayerShape"]
