"""A request, the sequences that answer it, and the groups of sequences that advance together.

::

    Request            one prompt and its parameters
      SequenceGroup    what the scheduler runs or preempts as one: a sample by itself, all beams together
        Sequence       token ids, and the block table that holds the keys and values of those computed
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from radixkv.cache import BlockTable
from radixkv.outputs import PromptLogprobs, RequestMetrics, SampleLogprobs
from radixkv.sampling.detokenizer import IncrementalDetokenizer
from radixkv.sampling.sampler import SamplingRow
from radixkv.sampling.structured_output import GrammarState
from radixkv.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from radixkv.sampling.beam_search import BeamSearch


UNKNOWN_TOKEN = -1


@dataclass(eq=False)
class Request:
    """One prompt to be answered.

    Attributes:
        request_id: chosen by the caller, unique among unfinished requests.
        prompt: the text, where it was given as text.
        prompt_token_ids: int32, at least one.
        params: how to choose tokens.
        seed: where the request's random numbers begin: its own seed, or one that the engine drew.
        max_new_tokens: tokens to generate at most, the model's length considered.
        end_token_ids: tokens that end an answer; none with ``ignore_eos``.
        namespace: whose cached prefixes it may share.
        read_cache: reuse what is cached.
        write_cache: leave what it computes for others.
        priority: lower values are let in earlier.
        arrival: how many requests came before it; the scheduler sets it.
        sequences: every sample or beam, finished ones included.
        grammar: what the answer must keep to, before its first token; None: anything.
        num_cached_tokens: prompt tokens that were reused when the request first ran; None before.
        failure: why the engine gave the request up.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: NDArray[np.int32]
    params: SamplingParams | BeamSearchParams
    seed: int
    max_new_tokens: int
    end_token_ids: frozenset[int]
    namespace: str = ""
    read_cache: bool = True
    write_cache: bool = True
    priority: int = 0
    arrival: int = 0
    grammar: GrammarState | None = None
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int | None = None
    beams: BeamSearch | None = None
    failure: Exception | None = None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(arrival_time=time.monotonic()))

    @cached_property
    def prompt_token_list(self) -> list[int]:
        """The prompt as every output of the request shows it; made once, for a stream has an output a token."""
        token_ids: list[int] = self.prompt_token_ids.tolist()
        return token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def finished(self) -> bool:
        return self.metrics.finished_time is not None

    @property
    def num_slots(self) -> int:
        """How many sequences the request will run side by side."""
        return self.params.beam_width if isinstance(self.params, BeamSearchParams) else self.params.n


@dataclass(eq=False)
class Sequence:
    """One continuation of a request's prompt.

    Attributes:
        index: which sample of the request.
        token_ids: prompt and generated tokens; the last ``num_unknown`` are placeholders.
        num_unknown: tokens that a device has chosen, or is about to, and that the host has not fetched yet.
        table: the blocks of what is computed; None while waiting.
        num_computed: tokens whose keys and values are in the table's blocks. The table itself may know fewer: decoding
            records them a block at a time.
        row: what the sampler keeps of the sequence; None for a beam.
    """

    request: Request
    index: int
    token_ids: list[int]
    table: BlockTable | None = None
    num_computed: int = 0
    num_unknown: int = 0
    row: SamplingRow | None = None
    detokenizer: IncrementalDetokenizer | None = None
    num_streamed: int = 0
    cumulative_logprob: float = 0.0
    logprobs: SampleLogprobs = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next one can be chosen; none once the last one allowed is on its way."""
        if self.num_unknown and len(self.token_ids) - self.request.num_prompt_tokens >= self.request.max_new_tokens:
            return 0
        return len(self.token_ids) - self.num_computed

    @property
    def num_known(self) -> int:
        """Tokens whose ids the host knows."""
        return len(self.token_ids) - self.num_unknown

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.request.num_prompt_tokens : self.num_known]

    def expect_token(self) -> None:
        """A token was chosen on the device: hold its place."""
        self.token_ids.append(UNKNOWN_TOKEN)
        self.num_unknown += 1

    def learn_token(self, token_id: int) -> None:
        """The oldest unknown token has come."""
        self.token_ids[self.num_known] = token_id
        self.num_unknown -= 1

    def forget_unknown(self) -> None:
        """What is on its way does not count: the answer has ended, or it began from a token that turned out another."""
        del self.token_ids[self.num_known :]
        self.num_unknown = 0


@dataclass(eq=False)
class SequenceGroup:
    """Sequences that are admitted, run and preempted as one. Beams choose their next tokens together.

    Attributes:
        prompt: what its first sequence must have computed before it can go on, as of when the group last began to wait.
        started: it was admitted before.
        num_together: not 0: its sequences have so many tokens in common, which the first, the only one with a table yet,
            computes for all.
    """

    request: Request
    sequences: list[Sequence]
    prompt: NDArray[np.int32]
    started: bool = False
    num_together: int = 0

    @property
    def rank(self) -> tuple[int, int, int]:
        """Priority, arrival, sample: who comes first where not all can, the most urgent and then the oldest."""
        return self.request.priority, self.request.arrival, self.sequences[0].index

    @property
    def num_slots(self) -> int:
        """Sequences that the group is or will soon be: before its first token, a request's only group stands for all."""
        return self.request.num_slots if len(self.request.sequences) == 1 else len(self.sequences)

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next can be chosen, of the sequence that has the most."""
        if len(self.sequences) == 1:  # all but beams; asked of every running group in every step
            return self.sequences[0].num_pending
        return max(sequence.num_pending for sequence in self.sequences)

    @property
    def num_common_tokens(self) -> int:
        """How many tokens all sequences begin with; 0 where there is only one."""
        if len(self.sequences) == 1:
            return 0
        # Whatever lies between the smallest and the largest begins as both do.
        token_ids = [sequence.token_ids for sequence in self.sequences]
        pairs = zip(min(token_ids), max(token_ids), strict=True)
        return next(i for i, (a, b) in enumerate(pairs) if a != b)
