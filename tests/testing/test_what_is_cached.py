"""The kit sees blocks that are cached in vain, or that should not be cached at all."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from radixkv.testing import find_violation

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import test_an_allocator as example


class EvictsParentsFirst(example.SimpleCache):
    """Evicts the shortest prefix, and keeps those that go on from it."""

    def allocate(self) -> int:
        if not self.free:
            evictable = (key for key, block in self.cached.items() if self.is_evictable(block))
            self.release(self.cached.pop(min(evictable, key=lambda key: len(key[1]))))
        return super().allocate()


def test_a_cached_block_without_the_one_before_it_is_found() -> None:
    """Only prompts that are known were looked up, and no prompt finds what lies behind an evicted block."""
    violation = find_violation(lambda n, size: example.SimpleAdapter(n, size, EvictsParentsFirst))
    assert violation is not None
    assert violation.rule == 4
    assert re.fullmatch(r"block \d is cached, and the block before it is not", violation.problem)
    assert len(violation.story) <= 6
