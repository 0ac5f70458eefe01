"""The prefix cache: token ids and block ids, no torch, no model, no device."""

from radixkv.cache.block_pool import BlockPool
from radixkv.cache.block_table import BlockTable, Hold
from radixkv.cache.errors import CacheError, ClosedError, InvalidArgumentError, InvariantViolation, OutOfBlocks
from radixkv.cache.eviction import LRU, EvictableLeaf, EvictionPolicy
from radixkv.cache.outline import NodeOutline
from radixkv.cache.prefix_cache import BlockCopy, PrefixCache
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.snapshot import NodeSnapshot
from radixkv.cache.stats import CacheStats

__all__ = [
    "LRU",
    "BlockCopy",
    "BlockPool",
    "BlockTable",
    "CacheError",
    "CacheStats",
    "ClosedError",
    "EvictableLeaf",
    "EvictionPolicy",
    "Hold",
    "InvalidArgumentError",
    "InvariantViolation",
    "NodeOutline",
    "NodeSnapshot",
    "OutOfBlocks",
    "PrefixCache",
    "RadixTree",
]
