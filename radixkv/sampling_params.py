"""Sampling, beam search and structured output: parameters with vLLM's names, defaults and meanings."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence, Sized
from dataclasses import InitVar, dataclass, replace
from typing import Any

from radixkv.cache.arguments import is_number, is_whole
from radixkv.option_words import hint
from radixkv.tools.grammar import AnswerFrame
from radixkv.vllm_options import (
    BEAM_SEARCH,
    SAMPLING,
    STRUCTURED_OUTPUTS,
    VllmOption,
    takes_vllm_options,
    without_vllm_options,
)

# Most token ids in one parameter: every step of the request looks at all of them.
MAX_TOKEN_IDS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 200
# Logits that are multiplied or divided by such factors stay within the range of float32.
_MIN_FACTOR, _MAX_FACTOR = 1e-30, 1e30


@takes_vllm_options(STRUCTURED_OUTPUTS)
@dataclass(kw_only=True, frozen=True)
class StructuredOutputsParams:
    """What an answer must look like: exactly one of these; ``frame`` may be added, or stand alone. (vLLM's names.)

    Attributes:
        json: a JSON schema, as text or as the object itself. The answer has at most one space between its parts.
        json_object: True: any JSON object.
        regex: a regular expression that the whole answer matches, in the syntax of Rust's regex crate.
        choice: the answer is one of these strings.
        grammar: a context-free grammar in Lark's syntax or in GBNF (EBNF as llama.cpp writes it).
        structural_tag: free text with constrained parts, as text or as the object itself:
            ``{"triggers": ["<call"], "structures": [{"begin": "<call>", "schema": {...}, "end": "</call>"}]}``. After a
            trigger the answer goes on with a structure that begins with it.
        frame: what surrounds the constrained part of the answer, such as reasoning before it, or tool calls in its place.
            Chats set it themselves.

    Raises:
        TypeError, ValueError: none or several are given, or one is impossible.
    """

    json: str | dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    frame: AnswerFrame | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.frame, AnswerFrame | None):
            raise TypeError(f"structured_outputs: frame must be an AnswerFrame, got {self.frame!r:.80}")
        if not isinstance(self.json_object, bool | None):
            raise TypeError(f"structured_outputs: json_object must be True or False, got {self.json_object!r:.80}")
        given = [
            name for name in ("json", "regex", "choice", "grammar", "structural_tag") if getattr(self, name) is not None
        ]
        if self.json_object:
            given.append("json_object")
        if len(given) != 1 and (given or self.frame is None):
            raise ValueError(
                "structured_outputs: expected one of json, json_object, regex, choice, grammar and structural_tag, "
                f"got {' and '.join(given) or 'none'}"
            )
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise TypeError(f"structured_outputs: {name} must be a string, got {getattr(self, name)!r:.80}")
        if self.choice is not None:
            listed = isinstance(self.choice, Collection) and not isinstance(self.choice, str)
            choices = list(self.choice) if listed else []
            if not choices or not all(isinstance(choice, str) and choice for choice in choices):
                raise ValueError(
                    f"structured_outputs: choice must be a list of non-empty strings, got {self.choice!r:.80}"
                )


@takes_vllm_options(SAMPLING)
@dataclass(kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Attributes:
        n: how many answers; their prompt is computed once.
        temperature: 0 takes the likeliest token; below 1 sharper, above 1 flatter.
        top_p: keep the likeliest tokens whose probabilities add up to this.
        top_k: keep this many of the likeliest; 0 or -1: all.
        min_p: keep tokens at least this fraction as likely as the likeliest.
        presence_penalty: subtracted from the logit of every token generated so far.
        frequency_penalty: subtracted from a token's logit once for each time that it was generated.
        repetition_penalty: divides positive, multiplies negative logits of tokens in prompt or answer.
        seed: of the request's random numbers; None or -1: the engine draws one. See `radixkv.sampling.sampler`.
        stop: strings that end an answer.
        stop_token_ids: tokens that end an answer; they are its last token, but not in its text. At most 1,024.
        min_tokens: the answer does not end before this many tokens, unless only an end token or ``bad_words`` are allowed.
        max_tokens: most tokens to generate; None: as many as the model and the cache have room for.
        logprobs: report log-probabilities of the chosen token and of this many of the likeliest; -1: the whole vocabulary.
        prompt_logprobs: the same for the prompt's tokens; its prefix is then computed, not reused.
        logit_bias: added to the logits of these token ids, clamped to -100 .. 100; at most 1,024 of them.
        bad_words: strings that may not be generated, at most 256: a string's last token is masked once the tokens before it
            have been generated, unless nothing else is allowed. Each string is tokenized both alone and after a space.
        allowed_token_ids: the only tokens that may be generated, at most 1,024; not together with ``structured_outputs``
            or, in a chat, with tools.
        ignore_eos: go on after the end-of-sequence token, but for one that ends ``structured_outputs``.
        detokenize: False: produce only tokens, no text, and in chats no ``answer``; not together with ``stop``.
        skip_special_tokens: leave special tokens out of the text.
        shown_special_tokens: special tokens that stay in the text; in chats, those that mark the parts of answers.
        include_stop_str_in_output: let the text end with the stop string, or the token that ended it.
        structured_outputs: what the answer must look like; it ends where that is complete, whatever ``min_tokens`` says.
        stop_strings: those of ``stop``, as a list; empty: none.
        end_token_ids: those of ``stop_token_ids``, as a set.
        biases: ``logit_bias`` after clamping; empty: none.

    Args:
        best_of: None or ``n``, because all answers are returned.

    Raises:
        TypeError, ValueError: a value is impossible; the message names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    shown_special_tokens: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    best_of: InitVar[int | None] = None

    def __post_init__(self, best_of: int | None) -> None:
        self.n = _whole("n", self.n, 1)
        if best_of not in (None, self.n):
            raise ValueError(
                f"best_of: expected n={self.n} or None, got {best_of!r:.80}; LLM.beam_search finds the likeliest answers"
            )
        self.temperature = _number("temperature", self.temperature, 0.0, _MAX_FACTOR)
        # Less would be 0 in float32; this bound, too, leaves only the likeliest token.
        self.top_p = max(_number("top_p", self.top_p, 0.0, 1.0, above=True), _MIN_FACTOR)
        self.top_k = _whole("top_k", self.top_k, -1)
        self.min_p = _number("min_p", self.min_p, 0.0, 1.0)
        self.presence_penalty = _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = _number("repetition_penalty", self.repetition_penalty, _MIN_FACTOR, _MAX_FACTOR)
        seed = _whole_or_none("seed", self.seed, -1)
        self.seed = None if seed == -1 else seed
        self.min_tokens = _whole("min_tokens", self.min_tokens, 0)
        self.max_tokens = _whole_or_none("max_tokens", self.max_tokens, 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens: expected at most {self.max_tokens}, the limit of the answer's tokens, got {self.min_tokens}"
            )
        self.logprobs = _whole_or_none("logprobs", self.logprobs, -1)
        self.prompt_logprobs = _whole_or_none("prompt_logprobs", self.prompt_logprobs, -1)
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            _check_switch(name, getattr(self, name))
        self.shown_special_tokens = _token_ids("shown_special_tokens", self.shown_special_tokens)
        _check_structured_outputs(self.structured_outputs)
        self.stop_strings = _stop_strings(self.stop)
        if self.stop_strings and not self.detokenize:
            raise ValueError(
                f"stop: expected none with detokenize=False, where there is no text, got {self.stop!r:.80}"
            )
        self.end_token_ids = frozenset(
            _token_ids("stop_token_ids", () if self.stop_token_ids is None else self.stop_token_ids)
        )
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids: expected at least one token id, got none")
            if self.structured_outputs is not None:
                raise ValueError("allowed_token_ids: not together with structured_outputs, which allows tokens itself")
        if self.bad_words is not None:
            self.bad_words = _bad_words(self.bad_words)
        if not isinstance(self.logit_bias, Mapping | None):
            raise TypeError(f"logit_bias: expected a dictionary of biases by token id, got {self.logit_bias!r:.80}")
        _check_count("logit_bias", self.logit_bias or (), MAX_TOKEN_IDS)
        self.biases = {}
        for token_id, bias in (self.logit_bias or {}).items():
            clamped = max(-100.0, min(100.0, _number("logit_bias", bias, -math.inf, math.inf)))
            self.biases[_whole("logit_bias", token_id, 0)] = clamped
        if self.greedy and self.n > 1:
            raise ValueError(f"n: expected 1 with temperature 0, where all answers are the same, got {self.n}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken: at temperature 0, or too close to it to divide by."""
        # Divided by less, logits would leave the range of float32; and the likeliest token already has all the probability.
        return self.temperature < 1e-5

    def clone(self) -> SamplingParams:
        """A copy that shares nothing with these."""
        return copy.deepcopy(self)

    def for_vocabulary(self, vocab_size: int) -> SamplingParams:
        """A copy for one request, validated anew because programs assign to fields, and for a model with so many tokens.

        Raises:
            TypeError, ValueError: a value is impossible by now, or was assigned to a field that there is not, or a token id
                or a number of tokens is beyond ``vocab_size``; the message names it.
        """
        params = replace(self)
        # `replace` has checked ``best_of``, which is not kept.
        _refuse_other_fields("sampling_params", vars(self), {**vars(params), "best_of": None}, SAMPLING)
        for name, ids in (
            ("logit_bias", params.biases),
            ("stop_token_ids", params.end_token_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
        ):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise ValueError(f"{name}: {token_id} is outside the vocabulary of {vocab_size} tokens")
        params.logprobs = _num_logprobs("logprobs", params.logprobs, vocab_size)
        params.prompt_logprobs = _num_logprobs("prompt_logprobs", params.prompt_logprobs, vocab_size)
        return params


@takes_vllm_options(BEAM_SEARCH)
@dataclass
class BeamSearchParams:
    """Parameters of one beam search.

    Attributes:
        beam_width: beams kept, and returned.
        max_tokens: tokens to generate at most; None: as many as the model and the cache have room for.
        ignore_eos: go on after the end-of-sequence token, but for one that ends ``structured_outputs``.
        temperature: divides the logits; 0 leaves them as they are.
        length_penalty: a beam's score is divided by its length to this power.
        stop: strings that end a beam.
        logprobs: report this many likeliest tokens per step, among those that ``structured_outputs`` allows.
        structured_outputs: what every beam must look like.
        stop_strings: those of ``stop``, as a list; empty: none.

    Raises:
        TypeError, ValueError: a value is impossible; the message names it.
    """

    beam_width: int
    max_tokens: int | None
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    stop: str | Sequence[str] | None = None
    logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self.beam_width = _whole("beam_width", self.beam_width, 1)
        self.max_tokens = _whole_or_none("max_tokens", self.max_tokens, 1)
        self.temperature = _number("temperature", self.temperature, 0.0, _MAX_FACTOR)
        # Lengths raised to a larger power leave the range of floats.
        self.length_penalty = _number("length_penalty", self.length_penalty, -10.0, 10.0)
        self.logprobs = _whole_or_none("logprobs", self.logprobs, 0)
        _check_switch("ignore_eos", self.ignore_eos)
        _check_structured_outputs(self.structured_outputs)
        self.stop_strings = _stop_strings(self.stop)

    def for_vocabulary(self, vocab_size: int) -> BeamSearchParams:
        """A copy for one search, see `SamplingParams.for_vocabulary`.

        Raises:
            TypeError, ValueError: a value is impossible; the message names it.
        """
        params = replace(self)
        _refuse_other_fields("params", vars(self), vars(params), BEAM_SEARCH)
        params.logprobs = _num_logprobs("logprobs", params.logprobs, vocab_size)
        return params


def wants_prompt_logprobs(params: SamplingParams | BeamSearchParams) -> bool:
    """Whether log-probabilities of the prompt are asked for, all of which is then computed."""
    return isinstance(params, SamplingParams) and params.prompt_logprobs is not None


def prompt_only_params() -> SamplingParams:
    """Those of a request that only computes its prompt. With a seed of its own, it takes none from later requests."""
    return SamplingParams(max_tokens=1, temperature=0.0, seed=0)


def _refuse_other_fields(
    argument: str, given: Mapping[str, Any], known: Mapping[str, Any], vllm_options: Mapping[str, VllmOption]
) -> None:
    """Refuse what a program assigned to a name that the parameters do not have, as it would have no effect."""
    if given.keys() <= known.keys():
        return
    others = {name: value for name, value in given.items() if name not in known}
    for name in without_vllm_options(others, vllm_options):
        raise TypeError(f"{argument}: unknown field {name!r}{hint(name, known)}")


def _num_logprobs(name: str, count: int | None, vocab_size: int) -> int | None:
    if count is not None and count > vocab_size:
        raise ValueError(f"{name}: expected at most {vocab_size}, got {count}")
    return vocab_size if count == -1 else count


def _whole(name: str, value: Any, low: int) -> int:
    """The number as a Python int: numpy's integers wrap around where Python's grow."""
    if not is_whole(value):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if value < low:
        raise ValueError(f"{name}: expected at least {low}, got {value}")
    return int(value)


def _whole_or_none(name: str, value: Any, low: int) -> int | None:
    return None if value is None else _whole(name, value, low)


def _number(name: str, value: Any, low: float, high: float, above: bool = False) -> float:
    if not is_number(value):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    number = float(value)
    # Infinite values are refused too; NaN fails every comparison.
    if not (math.isfinite(number) and low <= number <= high and not (above and number == low)):
        bounds = [f"{'more than' if above else 'at least'} {low}"] * math.isfinite(low)
        bounds += [f"at most {high}" if math.isfinite(high) else "finite"]
        raise ValueError(f"{name}: expected {' and '.join(bounds)}, got {value}")
    return number


def _check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r:.80}")


def _check_structured_outputs(value: Any) -> None:
    if not isinstance(value, StructuredOutputsParams | None):
        raise TypeError(f"structured_outputs: expected StructuredOutputsParams, got {type(value).__name__}")


def _check_count(name: str, values: Sized, limit: int) -> None:
    if len(values) > limit:
        raise ValueError(f"{name}: expected at most {limit:,} entries, got {len(values):,}")


def _token_ids(name: str, token_ids: Sequence[int]) -> list[int]:
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Collection):
        raise TypeError(f"{name}: expected a list of token ids, got {token_ids!r:.80}")
    _check_count(name, token_ids, MAX_TOKEN_IDS)
    return [_whole(name, token_id, 0) for token_id in token_ids]


def _bad_words(words: Sequence[str]) -> list[str]:
    if isinstance(words, str) or not isinstance(words, Collection):
        raise TypeError(f"bad_words: expected a list of strings, got {words!r:.80}")
    _check_count("bad_words", words, MAX_BAD_WORDS)
    for word in words:
        if not isinstance(word, str) or not word.strip() or len(word) > MAX_BAD_WORD_CHARACTERS:
            raise ValueError(
                f"bad_words: expected strings of 1 to {MAX_BAD_WORD_CHARACTERS} characters, not only white space, "
                f"got {word!r:.80}"
            )
    return list(words)


def _stop_strings(stop: Any) -> list[str]:
    if isinstance(stop, bytes) or not isinstance(stop, str | Collection | None):
        raise TypeError(f"stop: expected a string or a list of strings, got {stop!r:.80}")
    strings = [stop] if isinstance(stop, str) else list(() if stop is None else stop)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop: expected non-empty strings, got {string!r}")
    return strings
