"""Property tests for caches and allocators of key-value blocks: RadixKV's, or your own.

Write a `CacheAdapter` of a few methods for a cache, then::

    TestMyCache = cache_machine(MyAdapter).TestCase

Hypothesis opens, grows, forks, closes and aborts sequences at random, many of which share prefixes, in pools so small that
every call fails sometimes. A shadow memory records what was written to every slot, and eleven rules are checked after
every step (`RULES`). A run that breaks one is shrunk to a few steps, described in words (`RuleViolation.story`).

- `strategies`: prompts that share prefixes, pool shapes, and whole workloads to `replay`
- `find_violation`: the shortest story in which a cache breaks a rule, outside of a test
- `CheckedCache`: the rules alone, for tests and long runs of your own
- `policy_machine`: the contract of an eviction policy
- `PrefixCacheAdapter`: RadixKV's own cache, with any eviction policy

The strategies and the two machines need Hypothesis: ``pip install 'radixkv[testing]'``.

::

    adapter.py              the interface to a cache under test; checked_adapter.py: what it returns, checked
    checked_cache.py        a cache whose every step is checked: rules.py, shadow_memory.py
    live_sequence.py        what it has open; story.py: its steps in words
    machine.py              drives it at random, by strategies.py; search.py: the shortest run that breaks a rule
    workload.py             runs as plain steps
    policies.py             eviction policies; fake_leaf.py: what they are given
    arguments.py            what is refused
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.lazy_names import lazy_names

if TYPE_CHECKING:
    from radixkv.testing import strategies
    from radixkv.testing.adapter import BlockCopy, CacheAdapter, PrefixCacheAdapter
    from radixkv.testing.checked_cache import CheckedCache
    from radixkv.testing.fake_leaf import FakeLeaf
    from radixkv.testing.live_sequence import LiveSequence
    from radixkv.testing.machine import cache_machine
    from radixkv.testing.policies import policy_machine
    from radixkv.testing.rules import RULES, RuleViolation
    from radixkv.testing.search import find_violation
    from radixkv.testing.shadow_memory import ShadowMemory
    from radixkv.testing.workload import Step, replay

__all__ = [
    "RULES",
    "BlockCopy",
    "CacheAdapter",
    "CheckedCache",
    "FakeLeaf",
    "LiveSequence",
    "PrefixCacheAdapter",
    "RuleViolation",
    "ShadowMemory",
    "Step",
    "cache_machine",
    "find_violation",
    "policy_machine",
    "replay",
    "strategies",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "RULES": "rules",
        "RuleViolation": "rules",
        "BlockCopy": "adapter",
        "CacheAdapter": "adapter",
        "PrefixCacheAdapter": "adapter",
        "CheckedCache": "checked_cache",
        "LiveSequence": "live_sequence",
        "ShadowMemory": "shadow_memory",
        "Step": "workload",
        "replay": "workload",
        "cache_machine": "machine",
        "find_violation": "search",
        "FakeLeaf": "fake_leaf",
        "policy_machine": "policies",
        "strategies": "strategies",
    },
    extra="testing",
)
