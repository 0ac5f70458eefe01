"""OpenAI's and vLLM's fields for unsupported features, accepted with their defaults, which clients send."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from radixkv.server.strict import StrictModel


def _reject_unsupported(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    try:
        return validate(value)
    except ValidationError as error:
        raise PydanticCustomError("not_supported", "not supported") from error


def is_supported(field: FieldInfo) -> bool:
    """Whether a request's field is not an `Only`, which marks an unsupported one."""
    return not any(isinstance(each, WrapValidator) and each.func is _reject_unsupported for each in field.metadata)


_T = TypeVar("_T")
Only = Annotated[_T, WrapValidator(_reject_unsupported)]


class NotSupported(StrictModel):
    """Fields of both endpoints, each with the values that are accepted; all are vLLM's."""

    thinking_token_budget: Only[Literal[-1] | None] = None
    spaces_between_special_tokens: Only[Literal[True] | None] = None
    return_tokens_as_token_ids: Only[Literal[False] | None] = None
    kv_transfer_params: Only[None] = None
    ec_transfer_params: Only[None] = None
    vllm_xargs: Only[None] = None
    session_id: Only[None] = None
    watermarking: Only[Literal[False] | None] = None
    truncation_side: Only[Literal["left"] | None] = None
    logprob_token_ids: Only[None] = None
    repetition_detection: Only[None] = None
    stream_interval: Only[Literal[1] | None] = None
    return_token_offsets: Only[Literal[False] | None] = None
    return_mm_kwargs: Only[Literal[False] | None] = None
    mm_payload: Only[Literal["tensors"] | None] = None
    routed_experts_prompt_start: Only[Literal[0] | None] = None
    # Of its older versions.
    logits_processors: Only[Annotated[list[Any], Field(max_length=0)] | None] = None
    guided_whitespace_pattern: Only[None] = None
    structural_tag: Only[None] = None


class NotSupportedInChat(NotSupported):
    """Fields of `/v1/chat/completions`, each with the values that are accepted."""

    echo: Only[Literal[False] | None] = None
    include_reasoning: Only[Literal[True] | None] = None
    chat_template: Only[None] = None
    documents: Only[None] = None
    mm_processor_kwargs: Only[None] = None
    media_io_kwargs: Only[None] = None
    return_prompt_text: Only[Literal[False] | None] = None

    functions: Only[None] = None
    function_call: Only[Literal["none"] | None] = None
    modalities: Only[Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None] = None
    audio: Only[None] = None
    web_search_options: Only[None] = None
    moderation: Only[None] = None
    prompt_cache_retention: Only[Literal["in_memory", "24h"] | None] = None  # for how long at most


class NotSupportedInCompletions(NotSupported):
    """Fields of `/v1/completions`, each with the values that are accepted."""

    suffix: Only[None] = None
    prompt_embeds: Only[None] = None
