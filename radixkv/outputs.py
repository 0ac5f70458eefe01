"""What requests return, in vLLM's shapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from radixkv.tools.pieces import AnswerPiece, ParsedAnswer


@dataclass(slots=True)  # not frozen: that takes three times as long, and a token may have many of these
class Logprob:
    """A token's log-probability under the model, its rank from 1, and its text."""

    logprob: float
    rank: int
    decoded_token: str | None


FinishReason = Literal["stop", "length", "abort"]
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)

SampleLogprobs = list[dict[int, Logprob]]
PromptLogprobs = list[dict[int, Logprob] | None]


@dataclass(slots=True)
class DraftCounts:
    """How many drafted tokens were verified, and how many of them were accepted."""

    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of `time.monotonic`; None: not reached yet.

    Attributes:
        loaded_tokens: reused prompt tokens that were loaded for this request from tiers below the pool, by the tier's medium.
        load_seconds: from the decision to load, or to wait for a load of another request, until they were in the pool.
        drafts: counts over all its samples, by source (see `radixkv.drafting`).
    """

    arrival_time: float
    scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    loaded_tokens: dict[str, int] = field(default_factory=dict)
    load_seconds: float = 0.0
    drafts: dict[str, DraftCounts] = field(default_factory=dict)

    def clip_loaded_tokens(self, num_cached_tokens: int) -> None:
        """Count no more loaded tokens than were reused: some may have been evicted before the request could use them."""
        for medium in reversed(list(self.loaded_tokens)):
            excess = sum(self.loaded_tokens.values()) - num_cached_tokens
            if excess <= 0:
                return
            self.loaded_tokens[medium] -= min(excess, self.loaded_tokens[medium])
            if not self.loaded_tokens[medium]:
                del self.loaded_tokens[medium]


@dataclass(slots=True)
class CompletionOutput:
    """One generated answer (vLLM's "completion").

    Attributes:
        index: which of the request's ``n``.
        text: the answer, without the stop string unless that was asked for.
        token_ids: all generated tokens, an end token included.
        cumulative_logprob: sum of the chosen tokens' log-probabilities; None unless ``logprobs`` was asked for.
        logprobs: per generated token, log-probabilities of the chosen one, which comes first, and of the likeliest ones.
        finish_reason: why it ended; None while unfinished.
        stop_reason: the stop string or stop token id that ended it; None for the end-of-sequence token.
        answer: in a finished chat: text, reasoning and tool calls, separated; None elsewhere, and with ``detokenize=False``.
        pieces: in a chat: what is new, as text, reasoning and tool calls (see `radixkv.tools.pieces`); None elsewhere, and
            with ``detokenize=False``.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    answer: ParsedAnswer | None = None
    pieces: list[AnswerPiece] | None = None

    def finished(self) -> bool:
        """Whether the answer has ended."""
        return self.finish_reason is not None

    def extend(self, new: CompletionOutput) -> None:
        """Add what a stream yields next of this answer."""
        self.text += new.text
        self.token_ids += new.token_ids
        self.cumulative_logprob = new.cumulative_logprob
        if self.logprobs is not None:
            self.logprobs += new.logprobs or []
        self.finish_reason, self.stop_reason = new.finish_reason, new.stop_reason
        self.answer = new.answer
        if self.pieces is not None:
            self.pieces += new.pieces or []


@dataclass(slots=True)
class RequestOutput:
    """The outputs of a request: one per sample, with what they have in common.

    Attributes:
        outputs: one per sample (``n``); in a stream, only what is new, and not those that ended in an earlier output.
        prompt: the text, where it was given as text.
        prompt_logprobs: per prompt token as in `CompletionOutput`, None for the first token; None unless asked for.
        num_cached_tokens: prompt tokens that were reused rather than computed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics

    @property
    def has_news(self) -> bool:
        """Whether any answer got tokens or ended: some steps only compute more of the prompt."""
        return any(answer.token_ids or answer.finished() for answer in self.outputs)


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam: its tokens and text, including the prompt's, and the log-probabilities of the generated tokens.

    Attributes:
        text: includes special tokens and what ended the beam; None if the model has no tokenizer.
    """

    tokens: list[int]
    logprobs: SampleLogprobs
    cum_logprob: float
    text: str | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """A search's beams, best first.

    Attributes:
        num_prompt_tokens: tokens of the prompt, with which each beam begins.
        num_cached_tokens: how many of those were reused rather than computed.
        aborted: whether the search was aborted; its beams are then those that were complete.
    """

    sequences: list[BeamSearchSequence]
    num_prompt_tokens: int
    num_cached_tokens: int
    metrics: RequestMetrics
    aborted: bool = False

    @property
    def num_generated_tokens(self) -> list[int]:
        """Tokens of each beam beyond the prompt."""
        return [len(beam.tokens) - self.num_prompt_tokens for beam in self.sequences]
