"""Prompts as users pass them, converted to token ids.

A prompt is a string, a list of token ids, or a dictionary (`TextPrompt`, `TokensPrompt`) with ``prompt`` (its text),
``prompt_token_ids`` (its tokens) or both; and optionally

- ``cache_salt``: only prompts with the same salt share cached prefixes (a tenant, a user, an adapter);
- ``cache``: ``{"read": bool, "write": bool}``: whether to reuse what is cached, and to publish what is computed;
- ``resume``: a `CompletionOutput` for each of ``n``: answers that were begun, perhaps by another engine with the same
  model, and go on where they stopped, exactly as they would have gone on there. Outputs hold only what is new.
- ``prediction``: text that most of the answer is expected to equal; with ``speculative_config``, its tokens are drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, NotRequired, TypedDict, TypeVar

from radixkv.cache.arguments import check_unicode
from radixkv.model.text_interface import TextInterface
from radixkv.outputs import CompletionOutput
from radixkv.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams, wants_prompt_logprobs
from radixkv.tools.chat_format import AnswerForm

_Params = TypeVar("_Params", bound=SamplingParams | BeamSearchParams)


class _PromptOptions(TypedDict, total=False):
    cache_salt: str | None
    cache: Mapping[str, bool] | None
    resume: Sequence[CompletionOutput]
    prediction: str | None


class TextPrompt(_PromptOptions):
    """A prompt as text, with the options that the module describes."""

    prompt: str


class TokensPrompt(_PromptOptions):
    """A prompt as token ids, and its text if that is to be in the output."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]


PromptInput = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
_PROMPT_KEYS = frozenset({*TextPrompt.__annotations__, *TokensPrompt.__annotations__, *_PromptOptions.__annotations__})
# Keys of vLLM's prompts that programs pass with every prompt: an empty one has no effect.
_NOTHING_IF_EMPTY = frozenset({"multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids"})


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as token ids, with its text where there is one, and how it uses the cache.

    Attributes:
        namespace: only prompts of the same namespace share cached prefixes.
        read_cache: reuse what is cached.
        write_cache: publish what is computed.
        answer_form: what the answer looks like, where it is more than text.
        resume: what has been generated of the answers already.
        prediction: what the answer is expected to be, as token ids.
    """

    token_ids: Sequence[int]
    text: str | None = None
    namespace: str = ""
    read_cache: bool = True
    write_cache: bool = True
    answer_form: AnswerForm | None = None
    resume: Sequence[CompletionOutput] = ()
    prediction: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed, or found cached, before its answers begin, or go on."""
        begun = sum(len(output.token_ids) for output in self.resume if output.finish_reason is None)
        return len(self.token_ids) + begun

    def reuses_prefixes(self, params: SamplingParams | BeamSearchParams) -> bool:
        """Whether a request with these parameters reuses cached prefixes, see `Request.reuses_prefixes`.

        An answer that has begun needs no log-probabilities of its prompt any more.
        """
        return self.read_cache and (bool(self.resume) or not wants_prompt_logprobs(params))


def as_prompts(
    prompts: PromptInput | Sequence[PromptInput], loaded: TextInterface, add_special_tokens: bool = True
) -> list[Prompt]:
    """One prompt or a list of them, tokenized.

    Args:
        add_special_tokens: add the tokens with which the tokenizer begins or ends a text.

    Raises:
        TypeError, ValueError: a prompt has none of the forms above.
    """
    if isinstance(prompts, bytes) or not isinstance(prompts, str | Mapping | Sequence):
        raise TypeError(
            f"prompts: expected a string, token ids, a dictionary or a list of those, got {type(prompts).__name__}"
        )
    many: Any = [prompts] if isinstance(prompts, str | Mapping) or is_token_ids(prompts) else prompts
    return [_as_prompt(prompt, loaded, add_special_tokens) for prompt in many]


def is_token_ids(prompt: Any) -> bool:
    """Whether this is one prompt as a list of token ids, rather than a list of prompts or of messages."""
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        return False
    return len(prompt) > 0 and isinstance(prompt[0], Integral)


def one_for_each(name: str, values: Any, num_prompts: int) -> Sequence[Any]:
    """What an argument says for each prompt: its elements if it is a list of them, or else itself.

    Raises:
        ValueError: there are more or fewer than prompts.
    """
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        return [values] * num_prompts
    if len(values) != num_prompts:
        raise ValueError(f"{name}: expected one for each of {num_prompts} prompts, got {len(values)}")
    return values


def as_mapping(prompt: Any) -> Mapping[str, Any]:
    """A prompt of any form as a dictionary.

    Raises:
        TypeError: it has none of the forms.
    """
    if isinstance(prompt, Mapping):
        return prompt
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        return {"prompt_token_ids": prompt}
    raise TypeError(f"prompts: expected a string, token ids or a dictionary, got {prompt!r:.80}")


def tokenize(argument: str, text: str, loaded: TextInterface, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of the text of an argument.

    Raises:
        ValueError: it is not Unicode.
    """
    check_unicode(argument, text)
    ids: list[int] = loaded.require_tokenizer()(text, add_special_tokens=add_special_tokens)["input_ids"]
    return ids


def tokenize_bad_words(words: Sequence[str], loaded: TextInterface) -> list[list[int]]:
    """Token ids of words that may not be generated: each as it begins a text, and as it follows a space.

    Raises:
        ValueError: a word is not Unicode, or the model has no tokenizer.
    """
    texts = [text for word in words for text in (word.strip(), f" {word.strip()}", word)]
    tokenized = [tokenize("bad_words", text, loaded, add_special_tokens=False) for text in texts]
    # A tokenizer may have more tokens than the model, which generates none of those.
    return [list(ids) for ids in dict.fromkeys(map(tuple, tokenized)) if ids and max(ids) < loaded.vocab_size]


def with_answer_form(params: _Params, form: AnswerForm | None) -> _Params:
    """The parameters for an answer of this form.

    Their constraints apply to its content. Their stop strings and tokens end it wherever they are, in its thoughts, too; an
    answer that has to be calls has none.

    Raises:
        ValueError: a tool's schema cannot be enforced or is nested too deeply, ``allowed_token_ids`` are given beside tools,
            or the answer has parts that a beam search could not tell apart.
    """
    if form is None:
        return params
    structured = params.structured_outputs
    try:
        frame = form.frame(content_is_constrained=structured is not None)
    except RecursionError as error:
        raise ValueError("tools: expected fewer lists and objects within each other") from error
    if frame is not None:
        if structured is None and isinstance(params, SamplingParams) and params.allowed_token_ids is not None:
            raise ValueError(
                "allowed_token_ids: expected none together with tools, for which answers have a grammar, "
                f"got {params.allowed_token_ids!r:.80}"
            )
        structured = replace(structured, frame=frame) if structured else StructuredOutputsParams(frame=frame)
        params = replace(params, structured_outputs=structured)
    if form.calls_required:  # an answer without text, in which a stop string or token could only break a call
        params = replace(params, stop=None)
        if isinstance(params, SamplingParams):
            params = replace(params, stop_token_ids=None)
    markers = form.special_markers
    if not markers:
        return params
    if isinstance(params, BeamSearchParams):
        raise ValueError("use_beam_search: not for this model's answers, whose parts are marked by special tokens")
    return replace(params, shown_special_tokens=markers)


def cache_options(cache_salt: str | None, cache: Mapping[str, bool] | None) -> dict[str, Any]:
    """The arguments of `Prompt` for how it uses the cache.

    Raises:
        TypeError, ValueError: the salt is not a string of Unicode text, or ``cache`` has keys other than read and write, or
            values that are not booleans.
    """
    if cache_salt is not None:
        if not isinstance(cache_salt, str):
            raise TypeError(f"cache_salt: expected a string, got {cache_salt!r}")
        check_unicode("cache_salt", cache_salt)
    switches = dict(cache) if isinstance(cache, Mapping) else {}
    if (
        not isinstance(cache, Mapping | None)
        or not set(switches) <= {"read", "write"}
        or not all(isinstance(value, bool) for value in switches.values())
    ):
        raise ValueError(f"cache: expected {{'read': bool, 'write': bool}}, got {cache!r:.80}")
    return {
        "namespace": cache_salt or "",
        "read_cache": switches.get("read", True),
        "write_cache": switches.get("write", True),
    }


def _as_prompt(prompt: Any, loaded: TextInterface, add_special_tokens: bool) -> Prompt:
    prompt = {key: value for key, value in as_mapping(prompt).items() if key not in _NOTHING_IF_EMPTY or value}
    if "role" in prompt:
        raise ValueError(
            f"prompts: expected prompts, got a message of a conversation, which is for chat(): {prompt!r:.80}"
        )
    if not set(prompt) <= _PROMPT_KEYS or not {"prompt", "prompt_token_ids"} & set(prompt):
        raise ValueError(
            f"prompts: expected 'prompt' or 'prompt_token_ids', and no keys but {sorted(_PROMPT_KEYS)}, got {sorted(prompt)}"
        )
    options = cache_options(prompt.get("cache_salt"), prompt.get("cache"))
    resume = prompt.get("resume", ())
    if not isinstance(resume, Sequence) or not all(isinstance(output, CompletionOutput) for output in resume):
        raise TypeError(f"prompts: 'resume' must be a list of CompletionOutput, got {resume!r:.80}")
    prediction = prompt.get("prediction")
    if not isinstance(prediction, str | None):
        raise TypeError(f"prompts: 'prediction' must be a string, got {prediction!r:.80}")
    if prediction:
        options["prediction"] = tokenize("prediction", prediction, loaded, add_special_tokens=False)
    text = prompt.get("prompt")
    token_ids = prompt.get("prompt_token_ids")
    if token_ids is not None and isinstance(text, str | None):
        return Prompt(token_ids, text, **options, resume=resume)
    if not isinstance(text, str):
        raise TypeError(f"prompts: 'prompt' must be a string, got {text!r:.80}")
    ids = tokenize("prompts", text, loaded, add_special_tokens=add_special_tokens)
    if not ids:
        raise ValueError(f"prompts: {text!r} has no tokens; a prompt needs at least one")
    return Prompt(ids, text, **options, resume=resume)
