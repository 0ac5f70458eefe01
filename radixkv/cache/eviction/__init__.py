"""Which leaf is evicted first when blocks are needed: one interface, and one file per policy.

::

    policy.py               the interface
    lru.py, lfu.py, segmented_lru.py, priority.py, cost_aware.py          the policies by fixed rules
    adaptive.py             the one that learns: reuse_times.py: from when prefixes are used again; lru_shadow.py: against LRU
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from radixkv.cache.eviction.adaptive import Adaptive
from radixkv.cache.eviction.cost_aware import CostAware
from radixkv.cache.eviction.lfu import LFU
from radixkv.cache.eviction.lru import LRU
from radixkv.cache.eviction.policy import ClockedPolicy, EvictableLeaf, EvictionPolicy, LearningPolicy
from radixkv.cache.eviction.priority import PriorityTTL
from radixkv.cache.eviction.segmented_lru import SegmentedLRU

__all__ = [
    "LFU",
    "LRU",
    "POLICIES",
    "Adaptive",
    "ClockedPolicy",
    "CostAware",
    "EvictableLeaf",
    "EvictionPolicy",
    "LearningPolicy",
    "PriorityTTL",
    "SegmentedLRU",
]

POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = MappingProxyType(
    {
        "lru": LRU,
        "lfu": LFU,
        "segmented-lru": SegmentedLRU,
        "priority": PriorityTTL,
        "cost-aware": CostAware,
        "adaptive": Adaptive,
    }
)
"""Makers of eviction policies, by the values of the option ``eviction_policy``."""
