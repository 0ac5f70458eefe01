"""The drafting state of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from radixkv.drafting.acceptance import RequestRates
from radixkv.drafting.drafter import Draft, DraftContext


@dataclass(eq=False, slots=True)
class SequenceDrafts:
    """The drafts of one sequence, and how they proved.

    Attributes:
        context: the sequence as drafters see it.
        rates: how often drafts for it proved right.
        proposed: what each source drafted last, until it is known whether that was right.
        num_wrong: steps in which every source was wrong, less two for each in which one was right; at least 0, and at most
            the number at which drafters are asked about the sequence least often.
    """

    context: DraftContext
    rates: RequestRates = field(default_factory=RequestRates)
    proposed: dict[str, Draft] = field(default_factory=dict)
    num_wrong: int = 0
