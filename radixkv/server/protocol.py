"""What the completion and the chat endpoint have in common: fields with OpenAI's and vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypedDict

from pydantic import BaseModel, Field

from radixkv.outputs import CompletionOutput
from radixkv.sampling_params import BeamSearchParams, SamplingParams
from radixkv.server.response_format import StructuredRequest
from radixkv.server.strict import Strict

MAX_LOGPROBS = 20
# The engine's thread searches the text for all of them at every token: so many cost a stream up to 30 us a token.
_MAX_STOP_STRINGS = 32
_MAX_STOP_CHARACTERS = 1000
_SEEDS = 1 << 64

# Fields of requests that mean the same in SamplingParams, and those among them that a beam search has no use for.
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
)
_NOT_FOR_BEAMS = (
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "min_tokens",
    "logit_bias",
)


StopString = Annotated[str, Field(max_length=_MAX_STOP_CHARACTERS)]


class StreamOptions(Strict):
    """``include_usage``: the last chunk says how many tokens there were."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class CacheOptions(Strict):
    """Whether a prompt reuses what is cached, and leaves what it computed."""

    read: bool = True
    write: bool = True


class GenerationRequest(StructuredRequest):
    """Fields of both endpoints; null stands for the default."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=_MAX_STOP_STRINGS)] | None = None
    seed: Annotated[int, Field(ge=-(_SEEDS // 2), lt=_SEEDS)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Accepted, for clients send them, and without effect here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Not OpenAI's; with vLLM's names where it has them.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    cache: CacheOptions | None = None
    # Have the response say what of the prompt was known and why not more; not for streams.
    explain_cache: bool | None = None
    # Lower values are let in earlier. Not below the default: a client may let others go first, not push ahead of them.
    priority: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def sent_names(self) -> dict[str, str]:
        """By an argument's name in the library, what this request calls it where that is another name."""
        names = {"structured_outputs": self.structured_outputs_name}
        if self.beam_width is None:
            names["beam_width"] = "n"
        return names

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def params(
        self, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None, room: int
    ) -> SamplingParams | BeamSearchParams:
        """How to choose tokens.

        Args:
            max_tokens: tokens to generate at most; None: as far as the model goes.
            logprobs: how many of the likeliest tokens to report; None: report nothing.
            prompt_logprobs: the same for the prompt.
            room: tokens that the model takes after the prompt.

        Raises:
            TypeError, ValueError: a value is impossible; the message names it.
        """
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only for stream=true")
        if self.explain_cache and self.stream:
            raise ValueError("explain_cache: only for stream=false")
        if self.use_beam_search:
            return self._beam_search_params(room if max_tokens is None else max_tokens, logprobs, prompt_logprobs)
        for name in ("beam_width", "length_penalty"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: only for use_beam_search=true")
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS if getattr(self, name) is not None}
        return SamplingParams(
            **given,
            max_tokens=max_tokens,
            seed=None if self.seed is None else self.seed % _SEEDS,
            logit_bias=None if self.logit_bias is None else _by_token_id(self.logit_bias),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=self.structured_outputs_params(),
        )

    def _beam_search_params(
        self, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
    ) -> BeamSearchParams:
        for name in _NOT_FOR_BEAMS:
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: a beam search has no use for it")
        if prompt_logprobs is not None:
            raise ValueError("echo: a beam search has no log-probabilities of the prompt")
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


class ResponseHead(TypedDict):
    """What a response and all its chunks have in common."""

    id: str
    created: int
    model: str


class PromptTokensDetails(BaseModel):
    """How many prompt tokens were reused rather than computed."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of all prompts and of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


FinishReason = Literal["stop", "length"]


def finish_reason(output: CompletionOutput) -> FinishReason | None:
    """Why an answer ended; None while it has not."""
    if output.finish_reason is None:
        return None
    return "length" if output.finish_reason == "length" else "stop"


def _by_token_id(logit_bias: Mapping[str, float]) -> dict[int, float]:
    biases = {}
    for name, bias in logit_bias.items():
        if not (name.isascii() and name.isdigit()):
            raise ValueError(f"logit_bias: expected token ids as keys, got {name!r}")
        biases[int(name)] = bias
    return biases
