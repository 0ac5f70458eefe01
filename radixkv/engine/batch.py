"""A batch on its way: what was launched, and what the host still has to take in.

Between two decoding steps the host needs nothing but tokens, and the next step finds those on the device. So with
asynchronous scheduling the next step is launched first, and only then are the tokens fetched::

    device   | step 1      | step 2      | step 3      |
    host     launch 1, launch 2, take 1, launch 3, take 2, ...

What the host learns late can make part of a launched step useless: a sequence had ended, or its draw needed a second look
and came out otherwise. That part is dropped when the step is taken; keys and values that it wrote lie beyond what anybody
was told of, and whoever gets those slots next writes them later in the device's order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from radixkv.memory.upload import to_device
from radixkv.sampling.sampler import Choice
from radixkv.scheduling.request import Request, Sequence, SequenceGroup
from radixkv.scheduling.scheduler import ScheduledChunk


@dataclass(slots=True)
class LaunchedStep:
    """One batch through the model, its results not yet taken.

    Attributes:
        chunks: what was computed.
        logits: float32 ``[rows, vocabulary]``.
        sampled: sequences that get a token, each with its row of ``logits``.
        beams: groups that choose together, with their rows.
        choice: the tokens of ``sampled``, in that order, chosen on the device; None: the host has a say in them.
        void: sequences whose part does not count.
    """

    chunks: list[ScheduledChunk]
    logits: torch.Tensor
    sampled: list[tuple[SequenceGroup, Sequence, int]]
    beams: list[tuple[SequenceGroup, list[int]]]
    choice: Choice | None = None
    void: set[Sequence] = field(default_factory=set)

    @property
    def requests(self) -> list[Request]:
        """Whose chunks are in it."""
        return list({chunk.group.request.request_id: chunk.group.request for chunk in self.chunks}.values())

    def logits_of_sampled(self) -> torch.Tensor:
        """The rows of ``sampled``, in that order."""
        rows = [row for _, _, row in self.sampled]
        if rows == list(range(self.logits.shape[0])):
            return self.logits
        return self.logits[to_device(torch.tensor(rows), self.logits.device)]

    def computes(self, sequence: Sequence) -> bool:
        """Whether some of the sequence's tokens are in it."""
        return any(chunk.sequence is sequence for chunk in self.chunks)

    def place_of_tokens(self) -> dict[Sequence, int]:
        """Where in ``choice.token_ids`` each sequence's token is."""
        return {sequence: place for place, (_, sequence, _) in enumerate(self.sampled)}
