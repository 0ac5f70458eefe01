"""The prefix cache: token ids and block ids, no torch, no model, no device."""

from radixkv.cache.block_pool import BlockPool
from radixkv.cache.block_store import BlockCopy
from radixkv.cache.block_table import BlockTable
from radixkv.cache.cache_view import Demand
from radixkv.cache.errors import (
    CacheError,
    ClosedError,
    InvalidArgumentError,
    InvariantViolation,
    OutOfBlocks,
    PinQuotaExceeded,
)
from radixkv.cache.events import AllCleared, BlocksRemoved, BlocksStored, CacheEvent, EventLog
from radixkv.cache.eviction import (
    LFU,
    LRU,
    POLICIES,
    Adaptive,
    ClockedPolicy,
    CostAware,
    EvictableLeaf,
    EvictionPolicy,
    LearningPolicy,
    PriorityTTL,
    SegmentedLRU,
)
from radixkv.cache.explain import Computed, Divergence, Explanation, Reason
from radixkv.cache.outline import NodeOutline
from radixkv.cache.pin import Pin
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.snapshot import NodeSnapshot
from radixkv.cache.stats import CacheStats

__all__ = [
    "LFU",
    "LRU",
    "POLICIES",
    "Adaptive",
    "AllCleared",
    "BlockCopy",
    "BlockPool",
    "BlockTable",
    "BlocksRemoved",
    "BlocksStored",
    "CacheError",
    "CacheEvent",
    "CacheStats",
    "ClockedPolicy",
    "ClosedError",
    "Computed",
    "CostAware",
    "Demand",
    "Divergence",
    "EventLog",
    "EvictableLeaf",
    "EvictionPolicy",
    "Explanation",
    "InvalidArgumentError",
    "InvariantViolation",
    "LearningPolicy",
    "NodeOutline",
    "NodeSnapshot",
    "OutOfBlocks",
    "Pin",
    "PinQuotaExceeded",
    "PrefixCache",
    "PriorityTTL",
    "RadixTree",
    "Reason",
    "SegmentedLRU",
]
