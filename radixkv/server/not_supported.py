"""OpenAI's fields for what is not done here: taken where they ask for nothing, for clients send them with their defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from radixkv.server.strict import Strict


def _refuse(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(value)
    except ValidationError as error:
        raise PydanticCustomError("not_supported", "not supported") from error


_T = TypeVar("_T")
Only = Annotated[_T, WrapValidator(_refuse)]


class NotSupportedInChat(Strict):
    """Fields of `/v1/chat/completions`, each with all the values that it may have."""

    tools: Only[None] = None
    tool_choice: Only[Literal["none"] | None] = None
    parallel_tool_calls: Only[bool | None] = None  # there are no calls, so none run side by side
    functions: Only[None] = None
    function_call: Only[Literal["none"] | None] = None
    modalities: Only[Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None] = None
    audio: Only[None] = None
    prediction: Only[None] = None
    reasoning_effort: Only[None] = None
    verbosity: Only[Literal["medium"] | None] = None
    web_search_options: Only[None] = None
    moderation: Only[None] = None
    prompt_cache_options: Only[None] = None
    prompt_cache_retention: Only[Literal["in_memory"] | None] = None


class NotSupportedInCompletions(Strict):
    """Fields of `/v1/completions`, each with all the values that it may have."""

    suffix: Only[None] = None
