"""The rules that a cache of shared blocks must keep, and the report of a broken one.

A broken rule 9 is reported as rule 3 or 4, because that is the effect of a collision. To provoke one, test the cache with a
hash of a few bits. A cache that evicts a block before those that follow it breaks rule 4: no prompt finds them any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

RULES = MappingProxyType(
    {
        1: "a block is free, or counts as many owners as live sequences hold it, plus one if the cache does",
        2: "a block is written only by a sequence that is its sole owner",
        3: "a sequence reads exactly what was written for its own tokens under its own namespace",
        4: "a match is the longest cached prefix, and every prefix of a cached prefix is cached",
        5: "at least one prompt token is left to compute",
        6: "nothing that a live sequence uses is evicted, and no more than a call lacks",
        7: "no call raises; one that is refused changes nothing; what fits is not refused when no other sequence is live",
        8: "two namespaces never share a block",
        9: "tokens decide what is reused, not their hash",
        10: "free and held blocks are all blocks, and all are free when everything is closed and cleared",
        11: "what was computed twice is kept once",
    }
)
"""The rules by number, in words."""


class RuleViolation(AssertionError):  # noqa: N818 - it names what happened
    """A cache broke a rule.

    Attributes:
        rule: its number in `RULES`.
        problem: what was found.
        story: the steps of the run, in words; the last one broke the rule.

    Args:
        pool: what the cache was made of, in words.
    """

    def __init__(self, rule: int, problem: str, story: Sequence[str], pool: str) -> None:
        self.rule = rule
        self.problem = problem
        self.story = list(story)
        self._pool = pool
        steps = "\n".join(f"  {number}. {step}" for number, step in enumerate(story, start=1))
        super().__init__(
            f"rule {rule} is broken ({RULES[rule]}):\n{problem}\nThis is what happened in a cache of {pool}:\n{steps}"
        )

    def __reduce__(self) -> tuple[Any, ...]:  # copies would otherwise be made of the message alone
        return type(self), (self.rule, self.problem, self.story, self._pool), vars(self)
