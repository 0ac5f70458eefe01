"""Requests of other protocols as chat requests, whose errors name the field that the client sent."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import PrivateAttr, ValidationError

from radixkv.model.text_interface import TextInterface
from radixkv.prompts import ChatOptions, Message, Prompt
from radixkv.server.chat.request import ChatCompletionRequest
from radixkv.server.protocol import prompt_room
from radixkv.server.strict import StrictModel


class TranslatedChatRequest(ChatCompletionRequest):
    """A chat request that was made from another protocol's; `translate` makes it."""

    streams_in_parts = False
    drops_oldest_turns: bool = False  # where the conversation is too long, see `as_prompt`
    _field_names: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @property
    def request_field_names(self) -> dict[str, str]:
        own = super().request_field_names
        return {**self._field_names, **{name: self._field_names.get(field, field) for name, field in own.items()}}

    def as_prompt(self, messages: list[Message], options: ChatOptions, loaded: TextInterface) -> Prompt:
        """The conversation; without its oldest turns, if it may drop these and would leave no room for the answer.

        What follows the dropped turns is no longer behind the prefix that is cached. So up to half of those that would fit
        are dropped with the others, in steps of a power of two: the next requests of the conversation drop the same ones.
        The system messages at the beginning, and the last turn, stay. A turn begins with a user's message.
        """
        whole = super().as_prompt(messages, options, loaded)
        room = prompt_room(self.max_completion_tokens, loaded.max_model_len)
        head = list(takewhile(lambda message: message["role"] == "system", messages))
        begins = [index for index, message in enumerate(messages) if message["role"] == "user"]
        if not self.drops_oldest_turns or len(whole.token_ids) <= room or len(begins) < 2:
            return whole

        def without(num_turns: int) -> Prompt:
            return ChatCompletionRequest.as_prompt(self, [*head, *messages[begins[num_turns] :]], options, loaded)

        fewer = range(1, len(begins) - 1)
        least = 1 + bisect_left(fewer, True, key=lambda number: len(without(number).token_ids) <= room)
        step = 1 << max(0, (len(begins) - least).bit_length() - 2)
        return without(-(-least // step) * step)


def same_fields(body: StrictModel, *names: str, **renamed: str) -> dict[str, Any]:
    """Fields of a chat request that another protocol's request has, too; those that are null there are left out.

    Args:
        names: of fields that have the same name.
        renamed: chat field to the other name that it has.
    """
    fields = {**{name: name for name in names}, **renamed}
    return {field: value for field, name in fields.items() if (value := getattr(body, name)) is not None}


def translate(chat: Mapping[str, Any], field_names: Mapping[str, str]) -> TranslatedChatRequest:
    """A chat request with these fields.

    Args:
        field_names: chat field to the field that it was made from, where the two differ.

    Raises:
        RequestValidationError: a value is impossible; the error names the client's field.
    """
    try:
        request = TranslatedChatRequest.model_validate(chat)
    except ValidationError as error:
        errors = [
            {**detail, "loc": ("body", field_names.get(str(detail["loc"][0]), detail["loc"][0]), *detail["loc"][1:])}
            for detail in error.errors(include_url=False)
        ]
        # The error handler looks in this body for the parts of an error's location.
        body = {field_names.get(name, name): value for name, value in chat.items()}
        raise RequestValidationError(errors, body=body) from error
    request._field_names = field_names
    return request
