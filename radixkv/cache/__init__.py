"""The prefix cache: token ids and block ids, no torch, no model, no device.

::

    prefix_cache.py         the public interface: open, grow, fork, close
      block_table.py        one sequence's map from positions to blocks
      block_store.py        where tables get blocks; block_pool.py: which are free, and how many owners the others have
      radix_tree.py         prefixes -> blocks: node.py, children.py, match.py
      eviction/             which leaf goes first: an interface, and a file for each policy
    cache_control.py        pins, limits of owners, clearing: pin.py, owner_limits.py
    cache_view.py           what can be asked without a change: explanation.py, outline.py, snapshot.py, continuation.py,
                            stats.py
    observer.py             what is called when blocks come and go: event_recorder.py and events.py, evicted.py
    block_hash.py, tokens.py, lazy_heap.py                                names of blocks, tokens as bytes, a heap
    arguments.py, errors.py                                               what is refused, and by which errors; counted.py
    invariants.py           every rule that the cache keeps, verified from scratch
"""

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
from radixkv.cache.explanation import Computed, Divergence, Explanation, Reason
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
