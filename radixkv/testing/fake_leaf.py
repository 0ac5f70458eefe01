"""A stand-in for the leaves that an eviction policy is given."""

from __future__ import annotations


class FakeLeaf:
    """A leaf as a policy sees it."""

    def __init__(
        self,
        last_use: float,
        num_blocks: int,
        *,
        uses: int = 1,
        parent_uses: int = 1,
        depth: int = 0,
        priority: int = 0,
    ) -> None:
        self.last_use = last_use
        self.num_blocks = num_blocks
        self.uses = uses
        self.parent_uses = parent_uses
        self.depth = depth
        self.priority = priority
        self.group = 0

    def __repr__(self) -> str:
        return f"leaf of {self.num_blocks} blocks, last used at {self.last_use}"
