"""OpenAI's fields for unsupported features: accepted with values that request nothing, since clients send the defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from radixkv.server.strict import StrictModel


def _reject_unsupported(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    try:
        return validate(value)
    except ValidationError as error:
        raise PydanticCustomError("not_supported", "not supported") from error


_T = TypeVar("_T")
Only = Annotated[_T, WrapValidator(_reject_unsupported)]


class NotSupportedInChat(StrictModel):
    """Fields of `/v1/chat/completions`, each with the values that are accepted."""

    functions: Only[None] = None
    function_call: Only[Literal["none"] | None] = None
    modalities: Only[Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None] = None
    audio: Only[None] = None
    verbosity: Only[Literal["medium"] | None] = None
    web_search_options: Only[None] = None
    moderation: Only[None] = None
    prompt_cache_options: Only[None] = None
    prompt_cache_retention: Only[Literal["in_memory"] | None] = None


class NotSupportedInCompletions(StrictModel):
    """Fields of `/v1/completions`, each with the values that are accepted."""

    suffix: Only[None] = None
