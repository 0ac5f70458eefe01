"""The batch of one step: what goes from the scheduler through the model to the outputs.

::

    schedule                execute                              process
    chunks            ->    logits, sampled, beam_steps,   ->    tokens appended; sequences continue, fork or end
                            tokens (in flight)

Between two decoding steps the host contributes nothing but the tokens just sampled, and the next batch finds those on the
device. So with asynchronous scheduling the next batch is launched before the tokens of this one are fetched::

    device   | batch 1     | batch 2     | batch 3     |
    host     execute 1, execute 2, process 1, execute 3, process 2, ...

Part of a launched batch is useless if the host learns too late that a sequence had ended. That part is ignored when the batch
is processed, and a batch that is useless as a whole is dropped. Keys and values that it wrote lie beyond what was published,
and the next owner of those slots writes them later in the device's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from radixkv.drafting import Draft
from radixkv.memory.upload import to_device
from radixkv.sampling.sampler import InFlightTokens, SamplingState
from radixkv.scheduling.request import Request, SequenceGroup, TokenSequence


class ScheduledChunk(NamedTuple):
    """The next ``num_tokens`` pending tokens of ``sequence`` are computed in this step; ``completes``: none are left."""

    group: SequenceGroup
    sequence: TokenSequence
    num_tokens: int
    completes: bool

    def first(self, count: int) -> ScheduledChunk:
        """At most the first ``count`` of its tokens."""
        return self if count >= self.num_tokens else self._replace(num_tokens=count, completes=False)


class SampledRow(NamedTuple):
    """``sequence`` gets a token, sampled from row ``logits_row`` of the batch's logits; the rows after it are its drafts'."""

    group: SequenceGroup
    sequence: TokenSequence
    logits_row: int


class BeamStep(NamedTuple):
    """A beam search advances by one token, scored by rows ``logits_rows``, one per beam."""

    group: SequenceGroup
    logits_rows: list[int]


class AskedSequence(NamedTuple):
    """A sequence that drafters were asked about before a step.

    Attributes:
        num_tokens: its length then.
        proposed: what each source drafted.
        source: of the best draft, whose tokens may be verified; None: there is none.
    """

    sequence: TokenSequence
    num_tokens: int
    proposed: Mapping[str, Draft]
    source: str | None


@dataclass(slots=True)
class Batch:
    """One forward pass over packed chunks.

    Attributes:
        chunks: what is computed; from the scheduler.
        asked: the sequences that drafters were asked about.
        drafts: tokens that may come next, computed after the chunk, of sequences whose chunks complete them. The executor
            sets the attributes below.
        logits: float32 ``[rows, vocabulary]``.
        sampled: the sequences that get a token.
        beam_steps: the beam searches that advance.
        tokens: those of ``sampled``, in that order, sampled on the device; None: sampling them needs the host.
    """

    chunks: list[ScheduledChunk]
    asked: list[AskedSequence] = field(default_factory=list)
    drafts: dict[TokenSequence, Sequence[int]] = field(default_factory=dict)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    sampled: list[SampledRow] = field(default_factory=list)
    beam_steps: list[BeamStep] = field(default_factory=list)
    tokens: InFlightTokens | None = None

    @property
    def requests(self) -> list[Request]:
        """The requests whose tokens are computed."""
        return list(dict.fromkeys(chunk.group.request for chunk in self.chunks))

    @property
    def is_stale(self) -> bool:
        """Whether all of these requests have ended, so that nothing which was computed is used."""
        return all(chunk.group.request.finished for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        num_drafts = sum([len(draft) for draft in self.drafts.values()])
        return sum([chunk.num_tokens for chunk in self.chunks]) + num_drafts

    @property
    def sampling_states(self) -> list[SamplingState]:
        """The sampler's states of the sequences in ``sampled``."""
        return [row.sequence.sampling for row in self.sampled if row.sequence.sampling is not None]

    def sampled_logits(self) -> torch.Tensor:
        """The rows of ``sampled``, in that order, each followed by those of its drafts."""
        rows = [row.logits_row for row in self.sampled]
        if self.drafts:
            rows = [
                first + i
                for first, draft in zip(rows, self.sampled_drafts(), strict=True)
                for i in range(1 + len(draft))
            ]
        if rows == list(range(self.logits.shape[0])):
            return self.logits
        return self.logits[to_device(torch.tensor(rows), self.logits.device)]

    def sampled_drafts(self) -> list[Sequence[int]]:
        """Those of the sequences in ``sampled``, in that order."""
        return [self.drafts.get(row.sequence, ()) for row in self.sampled]

    def append_placeholders(self) -> None:
        """Let the sequences go on before their tokens are fetched."""
        for row in self.sampled:
            row.sequence.append_placeholder()

    def token_indices(self) -> dict[TokenSequence, int]:
        """Where in ``tokens`` each sequence's token is."""
        return {row.sequence: index for index, row in enumerate(self.sampled)}
