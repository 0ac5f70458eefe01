"""A stand-in for the leaves that an eviction policy is given."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field


@dataclass(eq=False)
class FakeLeaf:
    """A leaf as a policy sees it; see `radixkv.cache.EvictableLeaf`."""

    last_use: float
    num_blocks: int
    _: KW_ONLY
    uses: int = 1
    parent_uses: int = 1
    depth: int = 0
    priority: int = 0
    group: int = field(default=0, init=False)

    def __repr__(self) -> str:
        return f"leaf of {self.num_blocks} blocks, last used at {self.last_use}"
