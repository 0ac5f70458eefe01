"""A request, its sequences, and the groups of sequences that are scheduled as one.

::

    Request            one prompt and its parameters
      SequenceGroup    what is admitted and preempted as one: a single sample, or all beams
        TokenSequence  token ids, and the block table that holds the keys and values of those computed
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from radixkv.cache import BlockTable
from radixkv.drafting.sequence_drafts import SequenceDrafts
from radixkv.outputs import FinishReason, PromptLogprobs, RequestMetrics, SampleLogprobs
from radixkv.sampling.detokenizer import IncrementalDetokenizer
from radixkv.sampling.grammar.state import GrammarState
from radixkv.sampling.logit_changes import LogitChanges
from radixkv.sampling.sampler import SamplingState
from radixkv.sampling_params import BeamSearchParams, SamplingParams, wants_prompt_logprobs

if TYPE_CHECKING:
    from radixkv.sampling.beam_search import BeamSearch


PLACEHOLDER_TOKEN_ID = -1


@dataclass(eq=False)
class Request:
    """One prompt and its parameters.

    Attributes:
        request_id: chosen by the caller, unique among unfinished requests.
        prompt: the text, if it was given as text.
        prompt_token_ids: int32, at least one.
        params: how to sample, or search.
        seed: of the request's random numbers; None: the engine draws one when the request is added.
        max_new_tokens: tokens to generate at most, limited by the model's length.
        end_token_ids: tokens that end a sample; with ``ignore_eos`` those that end what a grammar asks for, else none.
        namespace: only prefixes cached under the same namespace are shared.
        read_cache: reuse cached prefixes.
        write_cache: publish what is computed; False, too, once the cache was cleared while the request was answered.
        priority: lower values are admitted earlier, preempted later, and evicted later.
        tenant: on whose behalf; tenants share fairly, and a priority is one among its tenant's own requests.
        arrival: number of requests that arrived before; set by the scheduler.
        grammar: constrains the output, in its initial state; None: unconstrained.
        bad_words: token ids of each of the parameters' ``bad_words``.
        prediction: what the client expects of the answer, as token ids: a draft.
        sequences: every sample or beam, finished ones included.
        prompt_logprobs: of the prompt tokens computed so far, where they are wanted.
        num_cached_tokens: prompt tokens that were reused when the request was first admitted; None before.
        beam_search: its state; None for samples.
        resumed: its answers were begun elsewhere (`radixkv.engine.resumption`).
        failure: why the engine failed the request, if it did.
        metrics: its times, and what was loaded and drafted for it.
        on_admitted: called by the engine, which it must neither block nor fail, when its prompt begins to be computed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: NDArray[np.int32]
    params: SamplingParams | BeamSearchParams
    seed: int | None
    max_new_tokens: int
    end_token_ids: frozenset[int]
    namespace: str = ""
    read_cache: bool = True
    write_cache: bool = True
    priority: int = 0
    tenant: str = ""
    arrival: int = 0
    grammar: GrammarState | None = None
    bad_words: Sequence[Sequence[int]] = ()
    prediction: Sequence[int] = ()
    sequences: list[TokenSequence] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int | None = None
    beam_search: BeamSearch | None = None
    resumed: bool = False
    failure: Exception | None = None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(arrival_time=time.monotonic()))
    on_admitted: Callable[[], object] | None = None

    @cached_property
    def prompt_token_list(self) -> list[int]:
        """The prompt as outputs show it; converted once, because a stream has an output per token."""
        token_ids: list[int] = self.prompt_token_ids.tolist()
        return token_ids

    @cached_property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def finished(self) -> bool:
        return self.metrics.finished_time is not None

    @cached_property
    def num_seqs(self) -> int:
        """How many sequences the request runs concurrently."""
        return self.params.beam_width if isinstance(self.params, BeamSearchParams) else self.params.n

    @cached_property
    def logit_changes(self) -> LogitChanges:
        """What its parameters change of the logits of every sample."""
        params = self.params
        assert isinstance(params, SamplingParams)
        forbidden = self.end_token_ids | params.end_token_ids if params.min_tokens else frozenset()
        return LogitChanges(params, forbidden, self.bad_words)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether the log-probabilities of its prompt are wanted and not complete; they come with the first token."""
        if self.resumed or self.metrics.first_token_time is not None:
            return False
        return wants_prompt_logprobs(self.params)

    @property
    def reuses_prefixes(self) -> bool:
        """Whether cached prefixes are reused. They have no logits, which the log-probabilities of a prompt need."""
        return self.read_cache and not self.lacks_prompt_logprobs


@dataclass(eq=False)
class TokenSequence:
    """One continuation of a request's prompt.

    Attributes:
        request: that it answers.
        index: which sample of the request.
        token_ids: prompt and generated tokens; the last ``num_placeholders`` are placeholders.
        table: the blocks of what is computed; None while waiting.
        num_computed: tokens whose keys and values are in the table's blocks. The table may have fewer tokens appended:
            decoding publishes per block.
        branch_points: after how many of its tokens a block is to be kept as it is, ascending (`BranchPoints`).
        num_placeholders: tokens sampled on the device, or about to be, that the host has not fetched yet.
        sampling: the sampler's state of the sequence; None for a beam.
        detokenizer: makes its text; None for a beam, and where the model has no tokenizer.
        drafts: its drafting state; None before the first draft.
        num_streamed: output tokens that were part of a streamed output already.
        end_streamed: whether a streamed output has said why it ended.
        num_resumed: output tokens that were generated elsewhere, before the sequence was resumed here.
        num_resumed_characters: characters of the text that belong to those tokens.
        cumulative_logprob: of its output tokens, where log-probabilities are wanted.
        logprobs: of each output token that was generated here, likewise.
        finish_reason: why it ended; None: it goes on.
        stop_reason: the stop string or token that ended it, if one did.
    """

    request: Request
    index: int
    token_ids: list[int]
    table: BlockTable | None = None
    num_computed: int = 0
    branch_points: list[int] = field(default_factory=list)
    num_placeholders: int = 0
    sampling: SamplingState | None = None
    detokenizer: IncrementalDetokenizer | None = None
    drafts: SequenceDrafts | None = None
    num_streamed: int = 0
    end_streamed: bool = False
    num_resumed: int = 0
    num_resumed_characters: int = 0
    cumulative_logprob: float = 0.0
    logprobs: SampleLogprobs = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next one can be sampled; none once the last allowed one is in flight."""
        if (
            self.num_placeholders
            and len(self.token_ids) - self.request.num_prompt_tokens >= self.request.max_new_tokens
        ):
            return 0
        return len(self.token_ids) - self.num_computed

    @property
    def num_known_tokens(self) -> int:
        """Tokens that are not placeholders."""
        return len(self.token_ids) - self.num_placeholders

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.request.num_prompt_tokens : self.num_known_tokens]

    def append_placeholder(self) -> None:
        """Stand in for a token that was sampled on the device."""
        self.token_ids.append(PLACEHOLDER_TOKEN_ID)
        self.num_placeholders += 1

    def fill_placeholder(self, token_id: int) -> None:
        """Replace the oldest placeholder by its token."""
        self.token_ids[self.num_known_tokens] = token_id
        self.num_placeholders -= 1

    def drop_placeholders(self) -> None:
        """Ignore tokens in flight: the sequence has ended."""
        del self.token_ids[self.num_known_tokens :]
        self.num_placeholders = 0


@dataclass(eq=False)
class SequenceGroup:
    """Sequences that are admitted, run and preempted as one. All beams of a search advance in the same step.

    Attributes:
        prefill_token_ids: those of the first sequence when the group was last queued, its answer so far included.
        started: whether it was admitted before.
        num_computed_at_start: tokens of the first sequence that were computed when the group was last started.
        num_computed_before: the most tokens of the first sequence that were computed when the group was preempted.
        num_shared_prefill_tokens: if not 0, the group's sequences have so many leading tokens in common, which the first
            sequence, the only one with a block table so far, prefills for all.
    """

    request: Request
    sequences: list[TokenSequence]
    prefill_token_ids: NDArray[np.int32]
    started: bool = False
    num_computed_at_start: int = 0
    num_computed_before: int = 0
    num_shared_prefill_tokens: int = 0

    @property
    def rank(self) -> tuple[int, int, int]:
        """Priority, arrival, sample: lower ranks are admitted first and preempted last."""
        return self.request.priority, self.request.arrival, self.sequences[0].index

    @property
    def num_seqs(self) -> int:
        """Concurrent sequences to reserve: before the first token, a request's only group stands for all its samples.

        A beam search keeps places for all its beams: when one ends at a stop string, another takes its place later.
        """
        request = self.request
        if request.beam_search is not None or len(request.sequences) == 1:
            return request.num_seqs
        return len(self.sequences)

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next can be sampled, of the sequence that has the most."""
        if len(self.sequences) == 1:  # the usual case, and evaluated for every running group in every step
            return self.sequences[0].num_pending
        return max(sequence.num_pending for sequence in self.sequences)

    @property
    def num_blocks(self) -> int:
        """Blocks in the tables of its sequences; those that they share count for each."""
        return sum(sequence.table.num_blocks for sequence in self.sequences if sequence.table is not None)

    @property
    def num_common_tokens(self) -> int:
        """Leading tokens that all sequences have in common; 0 if there is only one sequence.

        Several sequences must be those of a beam search, without tables: these are equally long and differ.
        """
        if len(self.sequences) == 1:
            return 0
        # The smallest and the largest in lexicographic order differ first; the others lie in between.
        token_ids = [sequence.token_ids for sequence in self.sequences]
        pairs = zip(min(token_ids), max(token_ids), strict=True)
        return next(i for i, (a, b) in enumerate(pairs) if a != b)
