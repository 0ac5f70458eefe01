"""What the completion and the chat endpoint have in common: request fields with OpenAI's and vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypedDict

from pydantic import BaseModel, BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer
from pydantic_core import PydanticCustomError

from radixkv.outputs import CompletionOutput
from radixkv.prompts import Prompt
from radixkv.sampling_defaults import SamplingDefaults
from radixkv.sampling_params import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_TOKEN_IDS,
    BeamSearchParams,
    SamplingParams,
)
from radixkv.server.response_format import StructuredRequest
from radixkv.server.strict import StrictModel

MAX_LOGPROBS = 20
# The engine's thread searches the text for all of them at every token; this many cost up to 30 us per token and stream.
MAX_STOP_STRINGS = 32
_MAX_STOP_CHARACTERS = 1000
_NUM_SEEDS = 1 << 64
# Most digits of a token id; Python refuses to read thousands.
_MAX_DIGITS = 20

# Request fields with the same name and meaning in SamplingParams.
_SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "bad_words",
    "allowed_token_ids",
)
# Fields that beam search does not support, each with the values that ask for what it does in any case.
_ACCEPTED_BY_BEAM_SEARCH: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "top_p": (1,),
        "top_k": (0, -1),
        "min_p": (0,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "stop_token_ids": ([],),
        "min_tokens": (0,),
        "logit_bias": ({},),
        "bad_words": ([],),
        "allowed_token_ids": (),
        "skip_special_tokens": (True,),
        "include_stop_str_in_output": (False,),
    }
)

TokenIds = Annotated[list[int], Field(max_length=MAX_TOKEN_IDS)]
BadWord = Annotated[str, Field(max_length=MAX_BAD_WORD_CHARACTERS)]


def _refuse_many_biases(biases: Any) -> Any:
    # Checked before any is validated: pydantic makes an error for each wrong one, which took a second for a megabyte of them.
    if isinstance(biases, dict) and len(biases) > MAX_TOKEN_IDS:
        raise PydanticCustomError("too_many_biases", f"expected at most {MAX_TOKEN_IDS:,} entries, got {len(biases):,}")
    return biases


StopString = Annotated[str, Field(max_length=_MAX_STOP_CHARACTERS)]


class StreamOptions(StrictModel):
    """``include_usage``: the last chunk has the token counts; ``continuous_usage_stats``: every chunk those so far, too."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class CacheOptions(StrictModel):
    """Whether a prompt reuses cached prefixes, and whether its own blocks are cached."""

    read: bool = True
    write: bool = True


class GenerationRequest(StructuredRequest):
    """Fields of both endpoints; null selects the default.

    Attributes:
        streams_in_parts: whether a stream is never in memory as a whole: its last event does not repeat the others.
    """

    streams_in_parts: ClassVar[bool] = True

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    seed: Annotated[int, Field(ge=-(_NUM_SEEDS // 2), lt=_NUM_SEEDS)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_refuse_many_biases)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Accepted because clients send them; without effect.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # vLLM's older field; here there is one backend, which enforces what all of vLLM's do.
    guided_decoding_backend: str | None = None

    # Not OpenAI's; with vLLM's names where it has them.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: TokenIds | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    # Keep this many of the prompt's last tokens; -1: as many as leave room for the answer, see `prompt_room`.
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    # Whether the tokenizer adds its special tokens to the prompt; by default to texts, and not to what a chat template wrote.
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    # The end of the response's id.
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    cache: CacheOptions | None = None
    # Explain in the response how much of the prompt was cached and why not more; not for streams.
    explain_cache: bool | None = None
    # Seconds after which the request may be given up, if it is not finished; the server may have a lower limit.
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    # Lower values are scheduled earlier. Not below the default: a client may lower its own precedence, not raise it.
    priority: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None

    @property
    def num_choices(self) -> int:
        """Answers per prompt."""
        return 1 if self.n is None else self.n

    @property
    def request_field_names(self) -> dict[str, str]:
        """Library argument name to this request's field name, where the two differ."""
        constraint = self.structured_outputs_name
        names = {} if constraint is None else {"structured_outputs": constraint}
        if self.beam_width is None:
            names["beam_width"] = "n"
        return names

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def includes_usage_in_every_chunk(self) -> bool:
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def truncated(self, prompt: Prompt, max_tokens: int | None, max_model_len: int) -> Prompt:
        """The prompt's last tokens, as many as ``truncate_prompt_tokens`` allows.

        Raises:
            ValueError: it allows none.
        """
        limit = self.truncate_prompt_tokens
        if limit == -1:
            limit = prompt_room(max_tokens, max_model_len)
        if limit == 0:
            raise ValueError("truncate_prompt_tokens: expected -1 or at least 1, got 0: a prompt needs a token")
        if limit is None or len(prompt.token_ids) <= limit:
            return prompt
        return replace(prompt, token_ids=prompt.token_ids[-limit:], text=None)

    def params(
        self,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        defaults: SamplingDefaults,
    ) -> SamplingParams | BeamSearchParams:
        """The request's sampling or beam search parameters.

        Args:
            max_tokens: tokens to generate at most; None: up to the model's length.
            logprobs: how many of the likeliest tokens to report; None: none.
            prompt_logprobs: the same for the prompt.
            defaults: what is sampled with where the request says nothing; a beam search has its own.

        Raises:
            TypeError, ValueError: a value is invalid; the message names it.
        """
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only for stream=true")
        for name in ("explain_cache", "prompt_logprobs"):
            if getattr(self, name) not in (None, False) and self.stream:
                raise ValueError(f"{name}: only for stream=false")
        if self.use_beam_search:
            return self._beam_search_params(max_tokens, logprobs, prompt_logprobs)
        for name, accepted in (("beam_width", None), ("length_penalty", 1)):
            if getattr(self, name) not in (None, accepted):
                raise ValueError(f"{name}: only for use_beam_search=true")
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS if getattr(self, name) is not None}
        fields: dict[str, Any] = {**defaults, **given, "max_tokens": max_tokens}
        return SamplingParams(
            **fields,
            seed=None if self.seed in (None, -1) else self.seed % _NUM_SEEDS,
            logit_bias=None if self.logit_bias is None else _parse_logit_bias(self.logit_bias),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=self.structured_outputs_params(),
        )

    def _beam_search_params(
        self, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> BeamSearchParams:
        for name, accepted in _ACCEPTED_BY_BEAM_SEARCH.items():
            if getattr(self, name) not in (None, *accepted):
                raise ValueError(f"{name}: not supported by beam search")
        if prompt_logprobs is not None:
            name = "echo" if self.prompt_logprobs is None else "prompt_logprobs"
            raise ValueError(f"{name}: beam search reports no log-probabilities of the prompt")
        beam_width = self.num_choices if self.beam_width is None else self.beam_width
        if self.num_choices > beam_width:
            raise ValueError(f"n: expected at most beam_width={beam_width}, got {self.n}")
        return BeamSearchParams(
            beam_width,
            max_tokens,
            ignore_eos=bool(self.ignore_eos),
            temperature=0.0 if self.temperature is None else self.temperature,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            stop=self.stop,
            logprobs=logprobs,
            structured_outputs=self.structured_outputs_params(),
        )


def prompt_room(max_tokens: int | None, max_model_len: int) -> int:
    """The most tokens of a prompt that leave room for an answer of ``max_tokens``; None: for any answer.

    They leave room for half of the model's length at most: clients also send ``max_tokens`` far beyond what they expect, and
    answers are cut to the room that there is.
    """
    return max_model_len - min(max_tokens or 1, max_model_len // 2)


class ResponseHead(TypedDict):
    """Fields common to a response and all its chunks."""

    id: str
    created: int
    model: str


class PromptTokensDetails(BaseModel):
    """Counts of the prompt's tokens.

    Attributes:
        cached_tokens: those that were reused rather than computed.
        cache_write_tokens: those that were computed and are kept; None unless the request marked what to keep.
        loaded_tokens: of the reused ones those that were loaded from a tier below the pool, by medium, where there are tiers.
    """

    cached_tokens: int
    cache_write_tokens: int | None = None
    loaded_tokens: dict[str, int] | None = None

    @model_serializer(mode="wrap")
    def _without_none(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        return {name: value for name, value in fields.items() if value is not None}


class CompletionTokensDetails(BaseModel):
    """Counts of generated tokens: those of reasoning, and drafts that proved right or not, which cost the client nothing."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Tokens of all prompts and of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


TextFinishReason = Literal["stop", "length"]


def finish_reason(output: CompletionOutput) -> TextFinishReason | None:
    """Why an answer ended; None while it has not."""
    if output.finish_reason is None:
        return None
    return "length" if output.finish_reason == "length" else "stop"


def _parse_logit_bias(logit_bias: Mapping[str, float]) -> dict[int, float]:
    biases = {}
    for name, bias in logit_bias.items():
        if not (name.isascii() and name.isdigit() and len(name) <= _MAX_DIGITS):
            raise ValueError(f"logit_bias: expected token ids as keys, got {name!r:.80}")
        biases[int(name)] = bias
    return biases
